"""The program of one device."""
