"""Which cut is best, on this device, this network, this minute."""
