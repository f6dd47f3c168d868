"""Listings of machine code as tests write them down."""


def listed(*lines: str) -> str:
    """A listing as cuobjdump prints it; each line is an instruction and the cycles that it waits."""
    text = []
    for number, line in enumerate(lines):
        words, _, stall = line.partition("|")
        text.append(f"        /*{16 * number:04x}*/  {words.strip()} ;  /* 0x0000000000007918 */")
        text.append(f"                                    /* 0x{int(stall or 1) << 41:016x} */")
    return "\n".join(text)
