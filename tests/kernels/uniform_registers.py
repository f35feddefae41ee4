"""Uniform registers that machine code of compute capability 9.0 reads where some path to it has not set them.

ptxas of Triton 3.6 makes such code where it works out the descriptors of wgmma (attnpatch.kernels.decode.unpack):
products are wrong then, or an address is out of bounds, and not in every process.
"""

import re

INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([^\s;]+)\s*([^;]*?)\s*;")
LABEL = re.compile(r"(\.L_x_\d+):")
REGISTER = re.compile(r"(g?desc\[)?\bUR(\d+)(\.64)?\b")
SETS = re.compile(r"(R2UR|S2UR|REDUX|VOTEU|U(?!TMA|ISETP|SETMAXREG)[A-Z0-9]+)\b")
"""Instructions whose first uniform register is what they set."""
SETS_TWO = re.compile(r"(ULDC|UIADD3|UMOV)\.64|U[A-Z0-9]+\.WIDE")


def unset(sass):
    """The instructions of ``nvdisasm -c`` that read a uniform register before it is set: their text."""
    code, labels = _parsed(sass)
    sets, reads = zip(*(_registers(name, arguments) for _, name, arguments, _ in code), strict=True)
    places = zip(code, _set_before(code, labels, sets), reads, strict=True)
    return [line for (*_, line), known, read in places if known is not None and read - known]


def _parsed(sass):
    """Predicate, name, arguments and text of each instruction, and which one each label stands before."""
    code, labels = [], {}
    for line in sass.splitlines():
        if match := LABEL.match(line):
            labels[match[1]] = len(code)
        elif match := INSTRUCTION.match(line):
            code.append((match[1], match[2], match[3], line.strip()))
    return code, labels


def _registers(name, arguments):
    """Numbers of the uniform registers that an instruction sets, and of those that it reads."""
    sets, reads = set(), set()
    in_registers = re.match(r"R\d+, R\d", arguments)  # the left operand of a product, so of two descriptors one
    for descriptor, number, wide in REGISTER.findall(arguments):
        first, sets_it = int(number), not sets and SETS.match(name)
        if descriptor == "gdesc[":
            first, count = (first + 2, 2) if in_registers else (first, 4)
        elif sets_it:
            count = 2 if SETS_TWO.match(name) else 1
        else:
            count = 2 if wide or descriptor or name == "UIADD3.64" else 1
        (sets if sets_it else reads).update(range(first, first + count))
    return sets, reads


def _set_before(code, labels, sets):
    """What is set before each instruction on all paths to it; None where none leads."""
    before = [None] * len(code)
    before[0], waiting = set(), [0]
    while waiting:
        i = waiting.pop()
        for j in _next(i, code, labels):
            known = before[i] | sets[i] if before[j] is None else before[j] & (before[i] | sets[i])
            if known != before[j]:
                before[j] = known
                waiting.append(j)
    return before


def _next(i, code, labels):
    predicate, name, arguments, _ = code[i]
    to = re.search(r"`\((\.L_x_\d+)\)", arguments) if name.startswith("BRA") else None
    goes_on = predicate or (to and re.match(r"!?U?P\d", arguments)) or not (to or name == "EXIT")
    return ([labels[to[1]]] if to else []) + ([i + 1] if goes_on and i + 1 < len(code) else [])
