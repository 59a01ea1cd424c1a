"""A tree of regions as the program that a user would have written, which a failing test prints."""

from __future__ import annotations

from .region_trees import LEAVES, Node, Tree

IN_PLACE = ("region", "torch", "shared region", "absent", "catch")
"""Nodes whose body is in the function that they are in, so that an exception may leave it on the way."""


def program(tree: Tree, *, is_native: bool = False) -> str:
    """Return Python source that defines ``tree(x)`` and ``backward(loss, retain_graph)``."""
    writer = _Writer(is_native)
    writer.function("tree", tree.root.body)
    writer.line("def backward(loss, retain_graph):", 0)
    writer.backward(tree.backward, 1)
    return "\n".join([*writer.constants, *writer.lines]) + "\n"


class _Writer:
    def __init__(self, is_native: bool) -> None:
        self.is_native = is_native
        self.constants: list[str] = []
        self.lines: list[str] = []

    def line(self, text: str, indent: int) -> None:
        self.lines.append("    " * indent + text)

    def function(self, name: str, nodes: tuple[Node, ...], indent: int = 0, is_quiet: bool = False) -> None:
        self.line(f"def {name}(x):", indent)
        self.body(nodes, indent + 1, is_quiet)
        self.line("return x", indent + 1)

    def body(self, nodes: tuple[Node, ...], indent: int, is_quiet: bool, raises: bool = False) -> None:
        for node in nodes:
            inside = raises and node is nodes[-1] and node.kind in IN_PLACE and node.kind != "catch"
            self.node(node, indent, is_quiet, inside)
            if inside:
                return
        if raises:
            self.line("raise Boom", indent)

    def node(self, node: Node, indent: int, is_quiet: bool, raises: bool = False) -> None:
        kind, name = node.kind, node.id
        if kind == "leaf":
            self.leaf(node, indent, is_quiet)
        elif kind == "rules":
            self.line(f"mpamp.set_op_rules('cpu', {node.option('ops')})", indent)
        elif kind == "residual":
            self.line(f"skip{name}, x = x * 0.5, x * 1.0", indent)
            self.body(node.body, indent, is_quiet)
            self.line(f"x = skip{name} + x", indent)
        elif kind == "catch":
            self.line("try:", indent)
            self.body(node.body, indent + 1, is_quiet, raises=True)
            self.line("except Boom: pass", indent)
        elif kind in ("region", "torch", "shared region", "absent"):
            self.line(f"with {self.context(node)}:", indent)
            self.body(node.body, indent + 1, is_quiet, raises)
            if not node.body and not raises:
                self.line("pass", indent + 1)
        elif kind == "decorated":
            change = self.changed_rules(node, self.lines, "    " * indent)
            self.line(f"@{self.region(node)}", indent)
            self.function(f"block{name}", node.body, indent)
            self.line(change, indent)
            self.line(f"x = block{name}(x)", indent)
        elif kind in ("parallel", "sequential"):
            for index, child in enumerate(node.body):
                self.function(f"block{name}_{index}", (child,), indent, is_quiet)
            blocks = "[" + ", ".join(f"block{name}_{i}" for i in range(len(node.body))) + "]"
            self.line(f"x = at_once({blocks}, x)" if kind == "parallel" else self.sequential(node, blocks), indent)
        else:
            self.function(f"block{name}", node.body, indent, is_quiet or kind == "compiled")
            self.line(self.call(node, f"block{name}"), indent)

    def leaf(self, node: Node, indent: int, is_quiet: bool) -> None:
        leaf = LEAVES[node.option("leaf")]
        call = leaf.call
        for param in leaf.params:
            for text in (f", {param})", f", {param},", f", {param}]", f", {param}."):
                call = call.replace(text, text.replace(param, f"{param}{node.id}"))
        if leaf.before != "x":
            self.line(f"x = {leaf.before}", indent)
        self.line(f"y = {call}" if is_quiet else f"y = seen({node.id}, {call})", indent)
        self.line(f"x = {leaf.after}", indent)

    def context(self, node: Node) -> str:
        if node.kind == "torch":
            options = dict(node.options)
            flags = f"enabled={options['enabled']}, cache_enabled={options['cache']}"
            return f"torch.autocast('cpu', dtype=torch.{options['dtype']}, {flags})"
        if node.kind == "absent":
            return "mpamp.autocast(absent_device)"
        if node.kind == "shared region" and not self.is_native:  # torch's own can't be entered again
            change = self.changed_rules(node, self.constants)
            self.constants += [f"region{node.id} = {self.region(node)}", change]
            return f"region{node.id}, region{node.id}"
        return self.region(node)

    def changed_rules(self, node: Node, lines: list[str], indent: str = "") -> str:
        """Keep a region's rules under a name; return what changes them, which no region made before may follow."""
        if not (node.option("mutated") and node.option("ops")) or self.is_native:
            return "pass"
        lines.append(f"{indent}rules{node.id} = {node.option('ops')}")
        return f"rules{node.id}.clear(); rules{node.id}.update({{'gelu': 'fp32', 'linear': 'promote'}})"

    def region(self, node: Node) -> str:
        options = dict(node.options)
        dtype = f"dtype=torch.{options['dtype']}"
        if self.is_native:
            flags = f"enabled={options['enabled']}, cache_enabled={options.get('cache', True)}"
            return f"torch.autocast('cpu', {dtype}, {flags})"
        words = [repr("cpu"), dtype]
        words += ["enabled=False"] if not options["enabled"] else []
        words += ["cache_enabled=False"] if not options.get("cache", True) else []
        words += ["persistent_cache=True"] if options.get("persistent") else []
        if options.get("table") is not None:
            words += [f"ops=whole_tables[{options['table']}]"]
        elif options["ops"] is not None:
            words += [f"ops=rules{node.id}" if options.get("mutated") and options["ops"] else f"ops={options['ops']}"]
        return f"mpamp.autocast({', '.join(words)})"

    def call(self, node: Node, block: str) -> str:
        options = dict(node.options)
        calls = {
            "thread": f"x = on_thread({block}, x)",
            "inherit": f"x = on_thread(mpamp.inherit_regions({block}), x)",
            "backward here": f"backward_here({block}, x)",
            "compiled": f"x = torch.compile({block}, backend={options.get('backend')!r})(x)",
            "function": f"x = FUNCTIONS[{options.get('by')!r}].apply({block}, x)",
            "wrapper": f"x = wrapped({block}, {options.get('reentrant')})(x)",
        }
        if node.kind != "checkpoint":
            return calls[node.kind]
        words = [f"use_reentrant={options['reentrant']}"]
        words += ["determinism_check='none'"] if options.get("determinism_check") == "none" else []
        words += ["early_stop=False"] if options.get("early_stop") is False else []
        words += ["context_fn=saving_products"] if options.get("selective") else []
        return f"x = checkpoint({block}, x, {', '.join(words)})"

    def sequential(self, node: Node, blocks: str) -> str:
        segments = min(node.option("segments"), max(len(node.body), 1))
        return f"x = checkpoint_sequential({blocks}, {segments}, x, use_reentrant={node.option('reentrant')})"

    def backward(self, node: Node, indent: int) -> None:
        if node.kind == "backward":
            self.line("loss.backward(retain_graph=retain_graph)", indent)
        elif node.kind == "thread":
            self.line("def work():", indent)
            self.backward(node.body[0], indent + 1)
            self.line("on_thread(work)", indent)
        elif node.kind == "busy":
            self.line("keep_busy()", indent)
            self.backward(node.body[0], indent)
        else:
            self.line(f"with {self.context(node)}:", indent)
            self.backward(node.body[0], indent + 1)
