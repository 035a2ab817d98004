"""What stays, what moves, and when: pure, events in, actions out."""
