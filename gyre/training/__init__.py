"""The room `training`; see the file map in README."""
