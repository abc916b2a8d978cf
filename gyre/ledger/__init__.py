"""The room `ledger`; see the file map in README."""
