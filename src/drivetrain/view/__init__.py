"""What a person sees of a run: a page, a live screen, two runs side by side.

Values come from `record` and `diagnose`, are gathered into a `RunView`, and go through pure
functions
into SVG, HTML or a terminal's cells. Nothing here touches a live process or imports torch.
"""
