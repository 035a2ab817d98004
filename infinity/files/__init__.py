"""Files of weights: what is in them, how parts are read and written, how they come to stand under their names."""
