"""How a length of time is said."""


def duration(seconds: float) -> str:
    """ "9 s", "2 min 4 s" or "1 h 12 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
