from research.shares import Event, busy, kind, shares


def test_time_is_an_operations_own():
    layer = ("jit_layer", 7)
    thread = [
        Event(0, 9e9, (*layer, "while")), Event(1e9, 3e9, (*layer, "dot")), Event(4e9, 8e9, (*layer, "call")),
        Event(5e9, 6e9, (*layer, "dot")), Event(9e9, 10e9, (*layer, "add")),
    ]  # fmt: skip
    assert busy(thread) == {(*layer, "while"): 3, (*layer, "dot"): 3, (*layer, "call"): 3, (*layer, "add"): 1}


def test_programs_of_one_name_are_told_apart():
    attention, product, rest = ("decoder", "attention"), ("decoder", "products"), ("decoder", "rest")
    known = {"jit_layer": [{"dot": attention, "add": rest}, {"dot": product, "sub": rest}]}
    first, second = (
        [Event(0, 2e9, ("jit_layer", number, "dot")), Event(2e9, 3e9, ("jit_layer", number, name))]
        for number, name in ((1, "add"), (2, "sub"))
    )
    copied = [Event(0, 1e9, ("jit_other", 3, "copy"))]
    assert shares([first, second, copied], known) == {
        attention: 2, product: 2, rest: 2, ("around", "rest"): 1,
    }  # fmt: skip


def test_kinds():
    assert kind("encode", "jit(encode)/jit(attention)/while/body/dot_general") == ("encoder", "attention")
    assert kind("layers", "jit(layers)/jit(paged_attention)/while") == ("decoder", "attention")
    assert kind("layer", "jit(layer)/dot_general") == ("decoder", "products")
    assert kind("layer", "jit(layer)/rsqrt") == ("decoder", "rest")
    assert kind("head", "jit(head)/dot_general") == ("around", "products")
