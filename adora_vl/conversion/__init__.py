"""Data sets of other people become prepared folders: tables, pictures, conversations, the hub."""
