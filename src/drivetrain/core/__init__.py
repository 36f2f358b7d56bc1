"""The ground floor: errors, units, and libraries that are only there when asked for."""
