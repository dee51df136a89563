"""Cases: the catalog of contenders, their profiles and predictions, capacity, sweeps and whole models."""
