"""One file per rule; ``gateway.routing.catalogue`` names them, ``docs/policies.md`` compares them.

Rules of other routers are written anew here from their descriptions: they see our index and our
bookings, so what is compared is the rule, not the product.
"""
