"""Cases: the catalog of contenders, their profiles and predictions, capacity and sweeps."""
