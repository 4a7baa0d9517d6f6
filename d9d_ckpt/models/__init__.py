"""Model families as data: names, transforms and placements, stated once for both directions."""
