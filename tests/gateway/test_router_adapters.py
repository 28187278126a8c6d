"""An adapter's name goes to the workers that have it, under the scope that they hash with."""

from __future__ import annotations

from routerkit import Rig

from shared.load import AdapterInfo


def test_only_workers_that_have_it() -> None:
    rig = Rig(workers=3)
    assert rig.router.profile("x") is None
    rig.join("w2", adapters=(AdapterInfo("x", "r1"),))
    for _ in range(10):
        decision = rig.router.decide(rig.query(rig.prompt(4), model="x"), rig.now)
        assert [scored.candidate.worker.id for scored in decision.order] == ["w2"]
    profile = rig.router.profile("x")
    assert profile is not None
    assert (profile.canonical, profile.adapter, profile.workers) == ("m", "x@r1", ("w2",))
    assert rig.router.models() == ("alias", "m", "x")
    assert (rig.router.parent("x"), rig.router.parent("m")) == ("m", None)
    rig.join("w2")
    assert rig.reject(rig.query([], model="x")).reason == "model_not_found"
    assert rig.router.models() == ("alias", "m")


def test_the_model_itself_is_served_by_all() -> None:
    rig = Rig(workers=2)
    rig.join("w1", adapters=(AdapterInfo("x", "r1"),))
    profile = rig.router.profile("m")
    assert profile is not None
    assert (profile.adapter, len(profile.workers)) == ("", 2)


def test_of_two_revisions_the_one_that_most_workers_have() -> None:
    rig = Rig(workers=3)
    for name, revision in (("w1", "r1"), ("w2", "r2"), ("w3", "r2")):
        rig.join(name, adapters=(AdapterInfo("x", revision),))
    profile = rig.router.profile("x")
    assert profile is not None
    assert profile.adapter == "x@r2"
    rig.router.set_health("w2", False, rig.now, "down")  # type: ignore[arg-type]
    profile = rig.router.profile("x")
    assert profile is not None
    assert profile.adapter == "x@r1", "the first by name of as many"


def test_a_models_name_means_the_model() -> None:
    rig = Rig(workers=2)
    rig.join("w1", adapters=(AdapterInfo("other", "r1"), AdapterInfo("m", "r1")))
    rig.join("w2", models=("other",))
    decision = rig.router.decide(rig.query(rig.prompt(4), model="other"), rig.now)
    assert [scored.candidate.worker.id for scored in decision.order] == ["w2"]
    profile = rig.router.profile("m")
    assert profile is not None
    assert profile.adapter == ""
