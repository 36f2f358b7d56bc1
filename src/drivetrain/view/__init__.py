"""Views of a run: a page, a live screen, two runs side by side.

Values from `record` and `diagnose` are gathered into a `RunView`, which pure functions turn into
SVG, HTML or terminal output. Nothing here touches a live process or imports torch.
"""
