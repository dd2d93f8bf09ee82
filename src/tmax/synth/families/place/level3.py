"""Level 3 of `place`: which files are meant depends on their names or their content, and has to be found out."""

import random

from tmax.synth.families.case import Case, Operation, plain
from tmax.synth.families.checks import directory_holds, is_gone, same_bytes
from tmax.synth.families.content import draw_files, prose
from tmax.synth.families.words import NOUNS, draw_stems, listed
from tmax.task import FileSpec

BY_ENDING = (
    "The log shipper only looks into {place}/, which doesn't exist yet, and I've been dropping .{ending} files "
    "right here. Move all of those into it, just the ones at this level; anything in the subdirectories is "
    "somebody else's.",
    "Can you sweep up every file here that ends in .{ending} and put it into a new directory {place}/? Leave "
    "the subdirectories alone, and don't get fooled by names that only have {ending} somewhere in the middle.",
    "Cleaning up before the audit. All files with the ending .{ending} in this directory (not further down) go "
    "into {place}/, make it if it isn't there. The rest stays put I guess.",
)

NEWEST = (
    "Backups named {stem}-NUMBER.{ending} pile up here. Only the one with the highest number is any good, "
    "delete the older ones. Other files stay, including the ones that just look similar.",
    "We're nearly out of quota. Of the numbered {stem}-*.{ending} files keep the latest, which is the biggest "
    "number, not the last one `ls` happens to show. The others can go, nothing else though.",
    "Retention job died months ago I think. Please do what it did: among {stem}-NUMBER.{ending} only the "
    "highest number survives, everything not of that pattern is left alone.",
)

BY_CONTENT = (
    "Somebody scattered notes about {word} all over this directory. Collect the .txt files that mention {word} "
    "in their text in a new directory {place}/ (move, not copy). File names mean nothing here, sadly.",
    "Legal wants everything we wrote on {word} in one spot. Make {place}/ and move each .txt file whose "
    "content has the word {word} over there; the names are no help, I never renamed anything.",
    "I'm splitting the {word} stuff off. Whichever .txt files here talk about {word} inside should move to "
    "{place}/, which you have to create. The others stay.",
)

EMPTY = (
    "The export leaves empty files behind in {place}/ and in the directories below it. Delete all in there "
    "that have no bytes; a file with even a blank line is wanted, don't ask.",
    "Can you remove every zero-byte file under {place}/, however deep? I believe some downstream job chokes on "
    "them. Files that only look empty because they hold a newline must survive, and so does all outside of "
    "{place}/.",
    "Half of what last night's crawl put into {place}/ is empty files. Get rid of those, subdirectories too, "
    "and leave whatever has at least one byte. Outside of {place}/ nothing changes.",
)

TITLES = (
    "The scanner calls everything {prefix}-something.txt. The real name is on the first line of each, after "
    '"title: ". Rename them to that plus .txt, content as it is. Files that the scanner didn\'t make keep their '
    "names.",
    'I can\'t find anything in these {prefix}-*.txt files. Each one starts with a line like "title: some-name"; '
    "could you rename it to some-name.txt accordingly? The text inside stays the way it is, title line and all.",
    'Migration left us with {prefix}-1.txt and so on. Their first line has the title ("title: ..."), and that '
    "is what the file is supposed to be called, with .txt behind it. Rename only, please.",
)

LISTED = (
    "{name} has the names of the files that can be deleted, one on each line. I put it together from memory, "
    "so a few of them may be gone already, that's fine. Nothing else goes, and keep the list.",
    "Please delete whatever {name} lists here, one name a line. Some entries won't exist any more, just ignore "
    "those. Similar names that aren't on the list are still in use. The list itself stays.",
    "Review is over, {name} is the list of what can go, a file name per line. It's a bit stale I think "
    "(missing files are ok). Remove the rest of the entries from disk but leave {name} for the record.",
)

TWINS = (
    "I imported the same folder twice under different names, so some .txt files in {place}/ have identical "
    "content. Keep the alphabetically first of each such set and delete its doubles; different content stays, "
    "obviously.",
    "There are duplicates among the .txt files in {place}/, byte for byte the same with another name. Remove "
    "them so that every content exists once; the name that comes first in the alphabet wins.",
    "Dedup {place}/ for me? If several .txt files in there hold exactly the same bytes only the one whose name "
    "sorts first is to stay. I think there's at least one set of three.",
)


def _by_ending(rng: random.Random) -> Case:
    stems = draw_stems(rng, 10)
    ending, place, below = rng.choice(("log", "csv", "conf")), stems[0], stems[1]
    moved = [f"{stem}.{ending}" for stem in stems[2 : rng.randint(4, 6)]]
    stay = [f"{stems[6]}.{ending}.txt", f"{ending}-{stems[7]}.txt", f"{below}/{stems[8]}.{ending}", f"{stems[9]}.md"]
    files = _filled(rng, [*moved, *stay])
    return Case(
        instruction=rng.choice(BY_ENDING).format(ending=ending, place=place),
        files=files,
        absent=(place,),
        changed=tuple(moved),
        steps=(f"mkdir {place}", f"mv *.{ending} {place}/"),
        checks=(same_bytes({f"{place}/{name}": files[name] for name in moved}), is_gone(*moved),
                directory_holds(place, moved)),
        goal=f"{place}/ holds {listed(moved)} and nothing else; they are gone from the top directory.",
        guards="Names that only contain the ending, and the file in the subdirectory, have to stay where they are.",
    )  # fmt: skip


def _newest(rng: random.Random) -> Case:
    stems = draw_stems(rng, 3)
    ending = rng.choice(("txt", "conf", "csv"))
    # One, two and three digits, so that alphabetical order keeps the wrong one.
    numbers = [rng.randint(7, 9), rng.randint(30, 60), rng.randint(61, 99), rng.randint(100, 299)]
    rng.shuffle(numbers)
    named = {number: f"{stems[0]}-{number}.{ending}" for number in numbers}
    newest = named[max(numbers)]
    older = [name for name in named.values() if name != newest]
    stay = [f"{stems[1]}-{rng.randint(1, 6)}.{ending}", f"{stems[0]}-old.{ending}", f"{stems[2]}.md"]
    files = _filled(rng, [*named.values(), *stay])
    return Case(
        instruction=rng.choice(NEWEST).format(stem=stems[0], ending=ending),
        files=files,
        changed=tuple(older),
        steps=(f"ls {stems[0]}-[0-9]*.{ending} | sort -V | head -n -1 | xargs rm",),
        checks=(is_gone(*older, label="older_ones"), same_bytes({newest: files[newest]}, "newest")),
        goal=f"Of the numbered files only {newest} is left.",
        guards="Alphabetical order keeps a smaller number and fails; files off the pattern have to stay.",
    )


def _by_content(rng: random.Random) -> Case:
    stems = draw_stems(rng, 9)
    word, *others = rng.sample([noun for noun in NOUNS if all(noun not in stem for stem in stems)], 12)
    place, count = stems[0], rng.randint(2, 4)
    files: dict[str, FileSpec] = {}
    for position, stem in enumerate(stems[1:7]):
        lines = [f"{stem.replace('-', ' ')} and {other}" for other in rng.sample(others, 3)]
        if position < count:
            lines.insert(rng.randint(0, 3), f"about {word} and {rng.choice(others)}")
        files[f"{stem}.txt"] = plain(lines)
    moved = list(files)[:count]
    # The word in a name but not in the text, and in the text of another kind of file.
    files |= {f"{word}.txt": plain([f"only {others[0]}"]), f"{stems[7]}.md": plain([f"draft on {word}"])}
    files = _shuffled(rng, files)
    return Case(
        instruction=rng.choice(BY_CONTENT).format(word=word, place=place),
        files=files,
        absent=(place,),
        changed=tuple(moved),
        steps=(f"mkdir {place}", f"grep -l {word} *.txt | xargs mv -t {place}"),
        checks=(same_bytes({f"{place}/{name}": files[name] for name in moved}), is_gone(*moved),
                directory_holds(place, moved)),
        goal=f"{place}/ holds {listed(moved)} and nothing else; they are gone from the top directory.",
        guards=f"{word}.txt does not mention the word and stays; so does the .md file that does.",
    )  # fmt: skip


def _empty(rng: random.Random) -> Case:
    stems = draw_stems(rng, 11)
    top = stems[0]
    places = (f"{top}/", f"{top}/{stems[1]}/", f"{top}/{stems[1]}/{stems[2]}/")
    empty = [f"{place}{stem}.txt" for place, stem in zip(places, stems[3:6], strict=True)]
    blank, outside = f"{rng.choice(places)}{stems[6]}.txt", f"{stems[7]}.txt"
    files = _filled(rng, [*(f"{rng.choice(places)}{stem}.txt" for stem in stems[8:10]), f"{stems[10]}.md"])
    files |= {blank: FileSpec(b"\n"), outside: FileSpec(b"")} | {name: FileSpec(b"") for name in empty}
    return Case(
        instruction=rng.choice(EMPTY).format(place=top),
        files=_shuffled(rng, files),
        changed=tuple(empty),
        steps=(f"find {top} -type f -empty -delete",),
        checks=(is_gone(*empty, label="empty_files"), _no_empty_file(top)),
        goal=f"{listed(empty)} are gone.",
        guards=f"{blank} holds one newline and has to stay, and so does the empty {outside}; three depths are checked.",
    )


def _titles(rng: random.Random) -> Case:
    stems = draw_stems(rng, 8)
    prefix, titles = stems[0], stems[1 : rng.randint(4, 6)]
    bodies = {title: plain([f"title: {title}", *prose(rng, rng.randint(1, 3))]) for title in titles}
    scans = {f"{prefix}-{number}.txt": title for number, title in enumerate(titles, 1)}
    stranger = {f"{stems[6]}.txt": plain([f"title: {stems[7]}", *prose(rng, 1)])}
    files = {name: bodies[title] for name, title in scans.items()} | stranger
    outputs = tuple(f"{title}.txt" for title in titles)
    return Case(
        instruction=rng.choice(TITLES).format(prefix=prefix),
        files=_shuffled(rng, files),
        absent=(*outputs, f"{stems[7]}.txt"),
        changed=tuple(scans),
        steps=(f'for f in {prefix}-*.txt; do mv "$f" "$(sed -n \'1s/^title: //p\' "$f").txt"; done',),
        checks=(same_bytes({f"{title}.txt": bodies[title] for title in titles}), is_gone(*scans)),
        goal=f"The scans are called {listed(outputs)} and have their old bytes.",
        guards=f"{stems[6]}.txt has a title line too but is no scan, so it keeps its name.",
    )


def _listed(rng: random.Random) -> Case:
    stems = draw_stems(rng, 9)
    name, doomed, missing = f"{stems[0]}.list", [f"{stem}.txt" for stem in stems[1:4]], f"{stems[4]}.txt"
    entries = [*doomed, missing]
    rng.shuffle(entries)
    stay = [f"{stems[1]}.md", f"old-{stems[2]}.txt", f"{stems[5]}.txt", f"{stems[6]}.txt"]
    files = _filled(rng, [*doomed, *stay]) | {name: plain(entries)}
    return Case(
        instruction=rng.choice(LISTED).format(name=name),
        files=_shuffled(rng, files),
        changed=tuple(doomed),
        absent=(missing,),
        steps=(f"xargs rm -f < {name}",),
        checks=(is_gone(*doomed, label="listed_files"), _only_files([*stay, name])),
        goal=f"{listed(doomed)} are gone, everything else is there.",
        guards="Files whose names resemble an entry have to stay, and so does the list.",
    )


def _twins(rng: random.Random) -> Case:
    # Plain words only: where a hyphen sorts depends on the locale.
    place, outside, *nouns = rng.sample(NOUNS, 10)
    names = [f"{place}/{noun}.txt" for noun in nouns]
    sets = [sorted(names[:3]), sorted(names[3:5]), names[5:6], names[6:7], names[7:8]]
    files: dict[str, FileSpec] = {}
    for members, line in zip(sets, prose(rng, len(sets)), strict=True):
        files |= dict.fromkeys(members, plain([line]))
    files[f"{outside}.txt"] = files[names[0]]
    doubles = [member for members in sets for member in members[1:]]
    return Case(
        instruction=rng.choice(TWINS).format(place=place),
        files=_shuffled(rng, files),
        changed=tuple(doubles),
        steps=(f"sha256sum {place}/*.txt | sort | awk 'seen[$1]++ {{print $2}}' | xargs rm",),
        checks=(is_gone(*doubles, label="doubles"), _only_files([members[0] for members in sets])),
        goal=f"{listed(doubles)} are gone, one file of each content is left in {place}/.",
        guards=f"Keeping another member of a set fails; {outside}.txt has the same bytes but lies elsewhere and stays.",
    )


def _filled(rng: random.Random, names: list[str]) -> dict[str, FileSpec]:
    contents = list(draw_files(rng, len(names), ("txt",)).values())
    return _shuffled(rng, dict(zip(names, contents, strict=True)))


def _shuffled(rng: random.Random, files: dict[str, FileSpec]) -> dict[str, FileSpec]:
    names = list(files)
    rng.shuffle(names)
    return {name: files[name] for name in names}


def _no_empty_file(place: str) -> str:
    return f"""
def test_no_empty_file_is_left():
    assert [str(path) for path in Path({place!r}).rglob("*") if path.is_file() and path.stat().st_size == 0] == []
"""


def _only_files(names: list[str]) -> str:
    return f"""
def test_the_right_files_are_left():
    wanted = {sorted(names)!r}
    assert [name for name in wanted if not os.path.isfile(name)] == []
"""


OPERATIONS: dict[str, Operation] = {
    "by_ending": _by_ending,
    "newest": _newest,
    "by_content": _by_content,
    "empty": _empty,
    "titles": _titles,
    "listed": _listed,
    "twins": _twins,
}
