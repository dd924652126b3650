"""Writing files and folders safely, and numbers as JSON can hold them."""
