"""What a real run could give: draws of simulations, the intervals made of them, and the figures of a window."""
