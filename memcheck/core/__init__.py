"""What everything else is written with: records, cases, devices, units, errors, tensors."""
