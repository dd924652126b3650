"""The work of a study: fits and evaluations, each kept in a store when done, so that a stopped study can resume."""
