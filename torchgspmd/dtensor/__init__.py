"""Parameters as DTensors, and operations that torch's DTensor lacks or gets wrong."""
