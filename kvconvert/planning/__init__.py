"""What a conversion will take, and what will fit, before it runs: memory, disk, cache, time."""
