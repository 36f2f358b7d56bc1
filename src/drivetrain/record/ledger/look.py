"""What the ledger's classes are called and painted, wherever they are shown."""

LABELS = {
    "productive": "productive",
    "evaluation": "evaluation",
    "data_wait": "data wait",
    "communication": "communication",
    "checkpoint": "checkpoint",
    "start_up": "start-up, shut-down",
    "compile": "compile",
    "recovery": "recovery",
    "redone": "redone work",
    "stalled": "stalled",
    "preempted": "preempted",
    "idle": "idle",
}
# Told apart by people who see colours differently, too (after Okabe and Ito).
COLOURS = {
    "productive": "#009e73",
    "evaluation": "#56b4e9",
    "data_wait": "#e69f00",
    "communication": "#0072b2",
    "checkpoint": "#cc79a7",
    "start_up": "#999999",
    "compile": "#b39ddb",
    "recovery": "#d55e00",
    "redone": "#f0e442",
    "stalled": "#a50026",
    "preempted": "#8c6d31",
    "idle": "#dddddd",
}
