"""The linear op and the handles of weights that it and the other layers use."""
