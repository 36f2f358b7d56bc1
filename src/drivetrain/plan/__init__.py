"""What a run will take before it is started: profile → cost → search → plans."""
