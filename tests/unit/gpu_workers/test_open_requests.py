"""What a worker has taken and not answered: a delivery is settled with its last request."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vla_platform.gpu_workers.items import Item, OpenDelivery
from vla_platform.gpu_workers.open_requests import OpenRequests
from vla_platform.inference.channel.base import Delivery
from vla_platform.inference.protocol import PredictRequest, RowShape

ROW = RowShape(cameras=(("top", 4, 4),), state_dim=1)


def opened(tag: int, num_requests: int, *, since: float = 0.0) -> OpenDelivery:
    return OpenDelivery(Delivery(tenant="a", frame=b"", tag=tag), "c" * 32, since, num_requests)


def item(delivery: OpenDelivery, name: str) -> Item:
    request = PredictRequest(
        request_id=name, policy="p", version=None, tasks=("reach",), row=ROW, timeout_s=1.0,
        place=(0, -1),
    )  # fmt: skip
    return Item(delivery, request, deadline=1.0, alone=False)


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    order=st.randoms(use_true_random=False),
)
def test_each_delivery_is_settled_once_with_its_last_request(sizes, order):
    requests = OpenRequests()
    items = []
    for tag, size in enumerate(sizes):
        delivery = opened(tag, size)
        requests.open(delivery)
        items += [item(delivery, f"{tag}-{number}") for number in range(size)]
    assert all(requests.add(one) for one in items)
    order.shuffle(items)
    left = dict(enumerate(sizes))
    settled: list[int] = []
    for one in items:
        tag = one.opened.delivery.tag
        left[tag] -= 1
        done = requests.answered([one])
        assert [tag] * (left[tag] == 0) == [delivery.tag for delivery in done]
        settled += [delivery.tag for delivery in done]
    assert sorted(settled) == list(range(len(sizes)))


def test_the_same_request_again_needs_no_answer_of_its_own():
    requests = OpenRequests()
    first, second = opened(1, 1), opened(2, 1)
    for one in (first, second):
        requests.open(one)
    kept = item(first, "r")
    assert requests.add(kept)
    assert not requests.add(item(second, "r"))
    assert requests.needs_no_answer(second) == [second.delivery]
    assert requests.answered([kept]) == [first.delivery]
    assert requests.add(item(second, "r"))  # it may come once more, and is worked on then


def test_what_is_old_is_renewed_and_what_is_left_is_given_up():
    requests = OpenRequests()
    old, young = opened(1, 1, since=1.0), opened(2, 1, since=5.0)
    for one in (old, young):
        requests.open(one)
    assert requests.before(3.0) == [old.delivery]
    requests.settled([old.delivery])
    assert not requests.holds(old.delivery)
    assert requests.give_up() == [young.delivery]
    assert requests.give_up() == []
