"""Many runs: sweeps, reports, and the presets of the paper. They read records and start runs; no run needs them."""
