"""Planning: profile → cost → search → plans, and the simulation of long runs."""
