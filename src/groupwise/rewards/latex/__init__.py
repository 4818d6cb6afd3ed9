"""Reading and comparing mathematical answers, bounded in time and size. See `equal` for the whole."""
