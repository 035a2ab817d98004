"""What looks on while a model trains, and changes nothing: figures, times, operations, collectives."""
