"""Everything that needs torch: weights, paged attention, sampling and the runner over them."""
