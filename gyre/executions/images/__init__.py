"""Images on disk: an unpacked folder, an OCI archive or layout, or a SIF becomes the root file system of sandboxes."""
