"""Many requests on one device-resident round: pages, prefix cache, scheduler, device programs, core loop, text."""
