"""``headwater doctor``: what stands between a deployment and exact routing, each with its fix."""
