"""A clock in place of the machine's."""


class FakeClock:
    """Seconds that pass only when somebody moves them on, or a little at every reading.

    Args:
        tick_s: Seconds by which a reading moves it on.
    """

    def __init__(self, tick_s=0.0):
        self.now_s = 0.0
        self.tick_s = tick_s

    def __call__(self):
        self.now_s += self.tick_s
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds
