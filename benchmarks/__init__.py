"""Side-by-side measurements: every figure is taken in the same run as what it is compared with."""
