"""What was measured, for people and for CI: machine facts, tables, plots, the page, baselines."""
