"""An observer that counts forward passes."""


class PassCount:
    arguments: dict = {}

    def __init__(self) -> None:
        self.passes = 0

    def observe(self, output, read, lay_out) -> None:
        self.passes += 1
