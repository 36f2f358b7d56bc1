"""What can be typed: names, options and help. The verbs themselves are imported when called."""
