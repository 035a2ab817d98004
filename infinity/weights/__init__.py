"""How weights come and go on the device."""
