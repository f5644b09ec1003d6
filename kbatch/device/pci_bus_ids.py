"""PCI bus ids, by which TensorFlow's devices and NVML's GPUs are the same."""

import re
from collections.abc import Iterable, Mapping

_BUS_ID = re.compile(r"([0-9a-f]+):([0-9a-f]{2}):([0-9a-f]{2})(?:\.([0-9a-f]))?", re.IGNORECASE)
_IN_DESCRIPTION = re.compile(r"pci bus id: ([^,]+)")


def normal_bus_id(text: str) -> str | None:
    """Writes a PCI bus id in one form.

    NVML gives the domain eight digits, TensorFlow four; either may use capitals.

    Example:

    >>> normal_bus_id("0000:0A:00.0"), normal_bus_id("<undefined>")
    ('00000000:0a:00.0', None)

    Args:
        text: A bus id: domain, bus, device and function in hexadecimal digits.

    Returns:
        The bus id as NVML writes it, in small letters, None if the text is none.
    """
    match = _BUS_ID.fullmatch(text.strip())
    if match is None:
        return None
    domain, bus, device, function = match.groups(default="0")
    return f"{int(domain, 16):08x}:{bus}:{device}.{function}".lower()


def devices_by_bus_id(descriptions: Iterable[tuple[str, str]]) -> Mapping[str, tuple[str, ...]]:
    """Finds the bus ids in TensorFlow's descriptions of its devices.

    Example:

    >>> devices_by_bus_id([("/device:GPU:0", "device: 0, pci bus id: 0000:01:00.0")])
    {'00000000:01:00.0': ('GPU:0',)}

    Args:
        descriptions: The name of each device and its description.

    Returns:
        TensorFlow's names by bus id, in the order given: several names where one GPU is cut into
        several logical devices. A device without a bus id, such as a CPU, is left out.
    """
    found: dict[str, tuple[str, ...]] = {}
    for name, description in descriptions:
        match = _IN_DESCRIPTION.search(description)
        bus_id = normal_bus_id(match.group(1)) if match else None
        if bus_id is not None:
            found[bus_id] = (*found.get(bus_id, ()), name.rpartition("/device:")[2])
    return found
