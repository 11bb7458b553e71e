import pytest
from builders import measured

from pipetune.core.diagnosis import Bottleneck, bottleneck
from pipetune.core.tuned import Ceiling

CEILING = Ceiling(samples_per_sec=1000.0, limit="compute")


@pytest.mark.parametrize(
    ("rate", "wait", "ceiling", "limit"),
    [
        (951.0, 0.0, CEILING, Bottleneck.COMPUTE),
        (951.0, 50.0, CEILING, Bottleneck.COMPUTE),  # at the ceiling the wait is overlap, not loss
        (900.0, 10.0, CEILING, Bottleneck.INPUT),
        (900.0, 9.9, CEILING, Bottleneck.BALANCED),
        (900.0, 50.0, None, Bottleneck.INPUT),
        (900.0, 2.0, None, Bottleneck.BALANCED),
        (900.0, 1.9, None, Bottleneck.COMPUTE),
        (100.0, 1.0, CEILING, Bottleneck.COMPUTE),  # a ceiling that was measured beside other load
    ],
)
def test_what_limits(rate, wait, ceiling, limit):
    assert bottleneck(measured(rate, data_wait_percent=wait), ceiling) is limit
