"""What a call costs: a region, an op, a scaler's step."""
