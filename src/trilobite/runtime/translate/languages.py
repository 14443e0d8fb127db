"""From and to which language: a code to force (NLLB, M2M100, mBART), a task's prefix (T5), or nothing.

A checkpoint says its languages by tokens of its tokenizer, or as T5 does, in config.json:
    "task_specific_params": {"translation_en_to_de": {"prefix": "translate English to German: "}}
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from trilobite.errors import SettingError

CODE = re.compile(r"[a-z]{3}_[A-Z][a-z]{3}|__([a-z]{2,3})__|[a-z]{2}_[A-Z]{2}")
"""Tokens of NLLB, of M2M100 and of mBART."""
TASK = re.compile(r"translation_(\w+?)_to_(\w+)")
SHOWN = 5

TWO_LETTERS = dict(
    pair.split(":")
    for line in (
        "af:afr am:amh ar:arb as:asm az:azj be:bel bg:bul bn:ben bo:bod bs:bos ca:cat cs:ces cy:cym da:dan",
        "de:deu el:ell en:eng eo:epo es:spa et:est eu:eus fa:pes fi:fin fo:fao fr:fra ga:gle gd:gla gl:glg",
        "gn:grn gu:guj ha:hau he:heb hi:hin hr:hrv ht:hat hu:hun hy:hye id:ind ig:ibo is:isl it:ita ja:jpn",
        "jv:jav ka:kat kk:kaz km:khm kn:kan ko:kor ky:kir lb:ltz lg:lug ln:lin lo:lao lt:lit lv:lvs mg:plt",
        "mi:mri mk:mkd ml:mal mn:khk mr:mar ms:zsm mt:mlt my:mya nb:nob ne:npi nl:nld nn:nno no:nob ny:nya",
        "oc:oci om:gaz or:ory pa:pan pl:pol ps:pbt pt:por ro:ron ru:rus rw:kin sa:san sd:snd si:sin sk:slk",
        "sl:slv sm:smo sn:sna so:som sq:als sr:srp st:sot su:sun sv:swe sw:swh ta:tam te:tel tg:tgk th:tha",
        "ti:tir tk:tuk tl:tgl tr:tur tt:tat ug:uig uk:ukr ur:urd uz:uzn vi:vie xh:xho yi:ydd yo:yor zh:zho",
        "zu:zul",
    )
    for pair in line.split()
)
"""ISO 639-1 -> the beginning of NLLB's code."""


@dataclass(frozen=True, kw_only=True)
class Direction:
    """What tells a model the languages. prefix: text before each sentence    first: token id to force, None = none.

    source: language code for the tokenizer, None = its own    declared: whether the checkpoint says its languages at all
    """

    prefix: str = ""
    first: int | None = None
    source: str | None = None
    declared: bool = True


def direction(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, to: str | None, source: str | None
) -> Direction:
    """The direction asked for. Raises SettingError, with the nearest names, for one that the checkpoint lacks."""
    codes = language_codes(tokenizer)
    if codes:
        if to is None:
            first = model.generation_config.forced_bos_token_id
            if first not in codes.values():
                raise SettingError(
                    f"this model has {len(codes)} languages; say which one with --to, for example de"
                )
        else:
            first = codes[chosen(to, codes, "--to")]
        return Direction(first=first, source=None if source is None else chosen(source, codes, "--from"))
    tasks = _tasks(model.config)
    if not tasks:
        return Direction(declared=False)
    if source is not None:
        source = chosen(source, {a for a, _ in tasks}, "--from")
    known = sorted({b for a, b in tasks if source in (None, a)})
    if to is None and len(known) > 1:
        raise SettingError(f"this model translates to {', '.join(known)}; say which one with --to")
    to = known[0] if to is None else chosen(to, known, "--to")
    fitting = [prefix for (a, b), prefix in tasks.items() if b == to and source in (None, a)]
    if len(fitting) > 1:
        raise SettingError(f"this model translates to {to} from several languages; say which one with --from")
    return Direction(prefix=fitting[0])


def language_codes(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Code -> token id of every language that the tokenizer has a token for."""
    named = getattr(tokenizer, "lang_code_to_id", None)
    if named:
        return {str(code): int(index) for code, index in named.items()}
    found = ((CODE.fullmatch(token), index) for token, index in tokenizer.get_added_vocab().items())
    return {match[1] or match[0]: index for match, index in found if match}


def chosen(name: str, known: Iterable[str], option: str) -> str:
    """The language of the checkpoint that a name means. Raises SettingError for none, and for several."""
    known = sorted(known)
    wanted = name.strip().lower()
    fitting = [code for code in known if code.lower() == wanted]
    if not fitting:
        beginnings = (wanted, TWO_LETTERS.get(wanted, wanted))
        fitting = [code for code in known if code.lower().split("_")[0] in beginnings]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise SettingError(f"{option} {name}: is one of {', '.join(fitting)}; say which")
    near = _nearest(wanted, known)
    count = f", of {len(known)}" if len(known) > len(near) else ""
    raise SettingError(
        f"{option} {name}: this model has no such language; the nearest it has: {', '.join(near)}{count}"
    )


def _nearest(wanted: str, known: list[str]) -> list[str]:
    names = {code.lower(): code for code in known}
    names |= {code.lower().split("_")[0]: code for code in known}
    beginnings = {code.split("_")[0]: code for code in known}
    names |= {two: beginnings[three] for two, three in TWO_LETTERS.items() if three in beginnings}
    near = get_close_matches(wanted, names, n=2 * SHOWN, cutoff=0.4)
    return list(dict.fromkeys(names[name] for name in near))[:SHOWN] or known[:SHOWN]


def _tasks(config: PreTrainedConfig) -> dict[tuple[str, str], str]:
    """(from, to) -> prefix, of the translation tasks in config.json."""
    params = getattr(config, "task_specific_params", None)
    found = {}
    for name, values in (params if isinstance(params, dict) else {}).items():
        match = TASK.fullmatch(str(name))
        if match and isinstance(values, dict):
            found[match[1], match[2]] = str(values.get("prefix") or "")
    return found
