"""Level 3 of `tally`: the answer lies in several files at once, or in an SQLite database that has to be explored."""

import random
import sqlite3
from collections import Counter
from dataclasses import dataclass

from tmax.synth.families.case import Case, Operation, plain
from tmax.synth.families.checks import holds_lines, holds_number, is_plain_file
from tmax.synth.families.content import draw_files, draw_levels, log
from tmax.synth.families.words import CITIES, NOUNS, PEOPLE, draw_stems, listed
from tmax.task import FileSpec

PAID_TOTAL = (
    "Finance keeps asking what {city} brought in. {db} in this directory is a dump of the shop's SQLite "
    "database; add up the amounts of all paid orders from customers there and write the sum to {out}. No "
    "sqlite3 command on this box I think, python has the module though.",
    "I've got a dashboard that says one thing about {city} and an accountant who says another. Work out from "
    "{db} (SQLite) what the paid orders of that city's customers come to in total, and put just that number "
    "into {out}.",
    "Before I rerun the invoices: total amount of the paid orders by customers from {city}, according to {db}, "
    "which is an SQLite file. Orders in any other state don't count. Only the number, in {out}.",
)

MOST_REFUNDS = (
    "Somebody is abusing refunds. In {db}, an SQLite file, find the customer with the most refunded orders, by "
    "number of orders and not by money, and write the customer's name to {out}.",
    "{db} is the shop's SQLite database. I want to call the one customer who had more orders refunded than "
    "anybody else (how many, not how much). Just the name in {out} please.",
    "Which customer in {db} had orders refunded most often? It's SQLite, two tables if I remember right. The "
    "amount doesn't matter here. Put the name into {out}.",
)

NEVER_ORDERED = (
    "We're about to mail everyone who signed up but never bought a thing. How many customers in {db} (SQLite) "
    "have no order at all? Number into {out}. A query I tried gave 0, which can't be right.",
    "{db} is an SQLite dump of the shop. I need the number of customers without a single order in {out}. There "
    "are guest orders in there that belong to nobody, maybe that's what throws me off.",
    "Count the customers in the SQLite file {db} who never ordered anything, whatever became of the order, and "
    "leave the number in {out}.",
)

ERRORS_BY_CITY = (
    "Our office in {city} says it's only them. {names} are the current log and its rotations, {users} says "
    "where each user sits. Count the {level} lines of users in {city} over all of the logs, number into {out}.",
    "How many {level} lines did people in {city} see in total? The logs are {names}, and {users} maps users to "
    "cities. I'd do it by hand but it's three files. Write the number to {out}.",
    "I need one figure for the incident report: {level} lines across {names} that belong to users from {city}, "
    "going by {users}. Just the number in {out}.",
)

UNFINISHED = (
    "Some jobs hang and nobody notices. {names} is one log, rotated (.2 is the oldest), with a line when a job "
    "starts and one when it finishes. Which jobs started and never finished? Names into {out}, one a line, "
    "alphabetical.",
    "I restarted the scheduler last night and lost track. From {names}, which are successive rotations of one "
    "log, list the jobs that were started but have no finish anywhere, sorted, one per line, in {out}.",
    "Going through {names} by eye takes forever. A job that starts before a rotation often finishes in the "
    "next file. Put those that never finish at all into {out}, one name a line from a to z.",
)

STATES = ("paid", "open", "refunded", "cancelled")


@dataclass(frozen=True)
class Shop:
    """The rows of a shop's database; ids count from 1."""

    customers: tuple[tuple[int, str, str], ...]
    """(id, name, city)"""
    orders: tuple[tuple[int, int | None, int, str], ...]
    """(id, customer's id or None for a guest, amount, state)"""

    def city_of(self, customer: int | None) -> str | None:
        """The city of a customer, None for a guest."""
        return None if customer is None else self.customers[customer - 1][2]


def _shop(rng: random.Random) -> Shop:
    names = rng.sample(PEOPLE, rng.randint(9, 13))
    cities = rng.sample(CITIES, 4)
    customers = tuple((number, name, rng.choice(cities)) for number, name in enumerate(names, 1))
    buyers = rng.sample(range(1, len(names) + 1), len(names) - rng.randint(2, 4))
    orders = tuple(
        (number, None if rng.random() < 0.1 else rng.choice(buyers), rng.randint(5, 250), rng.choice(STATES))
        for number in range(1, rng.randint(36, 60))
    )
    return Shop(customers, orders)


def _database(shop: Shop) -> FileSpec:
    with sqlite3.connect(":memory:") as base:
        base.executescript(
            "PRAGMA page_size = 4096;"
            "CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT NOT NULL, city TEXT NOT NULL);"
            "CREATE TABLE orders (id INTEGER PRIMARY KEY, customer_id INTEGER, amount INTEGER NOT NULL,"
            " state TEXT NOT NULL);"
        )
        base.executemany("INSERT INTO customers VALUES (?, ?, ?)", shop.customers)
        base.executemany("INSERT INTO orders VALUES (?, ?, ?, ?)", shop.orders)
        base.commit()
        content = bytearray(base.serialize())
    base.close()
    # The library writes its own version here; a fixed one keeps the bytes the same everywhere.
    content[96:100] = (3040000).to_bytes(4, "big")
    return FileSpec(bytes(content))


def _query(db: str, sql: str, out: str) -> str:
    return (
        f"python3 - > {out} <<'EOF'\n"
        "import sqlite3\n"
        f'rows = sqlite3.connect("{db}").execute("""{sql}""")\n'
        "print(rows.fetchone()[0])\n"
        "EOF"
    )


def _names(rng: random.Random, files: dict[str, FileSpec]) -> list[str]:
    nouns = {name.split(".")[0].split("-")[-1] for name in files}
    return [stem for stem in draw_stems(rng, 7) if stem.split("-")[-1] not in nouns]


def _paid_total(rng: random.Random) -> Case:
    while True:
        shop = _shop(rng)
        city = rng.choice(shop.customers)[2]
        here = [(amount, state) for _, customer, amount, state in shop.orders if shop.city_of(customer) == city]
        total = sum(amount for amount, state in here if state == "paid")
        if 0 < total < sum(amount for amount, _ in here):
            break
    files = draw_files(rng, 1, ("txt", "md"))
    db, out = f"{(spare := _names(rng, files))[0]}.db", f"{spare[1]}.txt"
    sql = f"SELECT sum(amount) FROM orders JOIN customers ON customers.id = customer_id WHERE city = '{city}'"
    return Case(
        instruction=rng.choice(PAID_TOTAL).format(city=city, db=db, out=out),
        files={db: _database(shop), **files},
        absent=(out,),
        steps=(_query(db, f"{sql} AND state = 'paid'", out),),
        checks=(holds_number(out, total),),
        goal=f"{out} holds {total}.",
        guards="Orders in other states and of other cities are in the database, so leaving a condition out fails.",
        python=True,
    )


def _most_refunds(rng: random.Random) -> Case:
    while True:
        shop = _shop(rng)
        refunds = [(buyer, amount) for _, buyer, amount, state in shop.orders if state == "refunded" and buyer]
        ranks = Counter(buyer for buyer, _ in refunds).most_common(2)
        if len(ranks) < 2 or ranks[0][1] == ranks[1][1]:
            continue
        by_money = Counter[int]()
        for buyer, amount in refunds:
            by_money[buyer] += amount
        if by_money.most_common(1)[0][0] != ranks[0][0]:
            break
    winner = shop.customers[ranks[0][0] - 1][1]
    files = draw_files(rng, 1, ("txt", "md"))
    db, out = f"{(spare := _names(rng, files))[0]}.db", f"{spare[1]}.txt"
    sql = (
        "SELECT name FROM orders JOIN customers ON customers.id = customer_id WHERE state = 'refunded' "
        "GROUP BY customer_id ORDER BY count(*) DESC LIMIT 1"
    )
    return Case(
        instruction=rng.choice(MOST_REFUNDS).format(db=db, out=out),
        files={db: _database(shop), **files},
        absent=(out,),
        steps=(_query(db, sql, out),),
        checks=(is_plain_file(out), holds_lines(out, [winner])),
        goal=f"{out} holds {winner}, who has {ranks[0][1]} refunded orders.",
        guards="Another customer has the largest refunded amount.",
        python=True,
    )


def _never_ordered(rng: random.Random) -> Case:
    while True:
        shop = _shop(rng)
        buyers = {buyer for _, buyer, _, _ in shop.orders}
        number = len([row for row in shop.customers if row[0] not in buyers])
        if number and None in buyers:
            break
    files = draw_files(rng, 1, ("txt", "md"))
    db, out = f"{(spare := _names(rng, files))[0]}.db", f"{spare[1]}.txt"
    sql = "SELECT count(*) FROM customers WHERE NOT EXISTS (SELECT 1 FROM orders WHERE customer_id = customers.id)"
    return Case(
        instruction=rng.choice(NEVER_ORDERED).format(db=db, out=out),
        files={db: _database(shop), **files},
        absent=(out,),
        steps=(_query(db, sql, out),),
        checks=(holds_number(out, number),),
        goal=f"{out} holds {number}.",
        guards="Guest orders have no customer, so `NOT IN` over the orders gives 0.",
        python=True,
    )


def _rotated(lines: list[str], stem: str) -> dict[str, FileSpec]:
    """Three successive parts of a log, the newest under the plain name."""
    third = len(lines) // 3
    parts = {
        f"{stem}.log": lines[2 * third :],
        f"{stem}.log.1": lines[third : 2 * third],
        f"{stem}.log.2": lines[:third],
    }
    return {name: plain(part) for name, part in parts.items()}


def _errors_by_city(rng: random.Random) -> Case:
    level = rng.choice(("WARN", "ERROR"))
    while True:
        people = rng.sample(PEOPLE, 8)
        places = dict(zip(people, rng.choices(rng.sample(CITIES, 3), k=8), strict=True))
        lines = log(rng, draw_levels(rng, 6, 16), users=tuple(people[:6]))
        city = rng.choice(list(places.values()))
        hits = [position for position, line in enumerate(lines) if line.level == level and places[line.user] == city]
        newest = [position for position in hits if position >= 2 * (len(lines) // 3)]
        if 0 < len(newest) < len(hits) < sum(places[line.user] == city for line in lines):
            break
    rows = [f"{person},{place}" for person, place in places.items()]
    files = draw_files(rng, 1, ("txt", "md"))
    stem, other, third = _names(rng, files)[:3]
    logs = _rotated([str(line) for line in lines], stem)
    users, out = f"{other}.csv", f"{third}.txt"
    match = f'$3 == "{level}" && place[substr($5, 6)] == "{city}"'
    script = f"NR == FNR {{place[$1] = $2; next}} {match} {{n++}} END {{print n + 0}}"
    return Case(
        instruction=rng.choice(ERRORS_BY_CITY).format(
            city=city, names=listed(list(logs)), users=users, level=level, out=out
        ),
        files={**logs, users: plain(["user,city", *rows]), **files},
        absent=(out,),
        steps=(f"awk '{script}' FS=, {users} FS=' ' {' '.join(logs)} > {out}",),
        checks=(holds_number(out, len(hits)),),
        goal=f"{out} holds {len(hits)}.",
        guards="The newest log alone gives a smaller number, all lines of the city a larger one.",
    )


def _unfinished(rng: random.Random) -> Case:
    files = draw_files(rng, 1, ("txt", "md"))
    stem, target = _names(rng, files)[:2]
    taken = {stem.split("-")[-1], target.split("-")[-1]}
    jobs = [noun for noun in rng.sample(NOUNS, rng.randint(14, 18)) if noun not in taken]
    hanging = sorted(rng.sample(jobs, rng.randint(2, 4)))
    events = [(rng.random(), job, "started") for job in jobs]
    events += [(time + rng.random() / 2, job, "finished") for time, job, _ in events if job not in hanging]
    events.sort()
    stamps = log(rng, ["INFO"] * len(events), services=("scheduler",))
    lines = [
        f"{stamp.time:%Y-%m-%d %H:%M:%S} INFO scheduler job={job} {what}"
        for stamp, (_, job, what) in zip(stamps, events, strict=True)
    ]
    logs, out = _rotated(lines, stem), f"{target}.txt"
    pipe = f"cat {' '.join(logs)} | grep -o 'job=[a-z]*' | sort | uniq -u | cut -d= -f2"
    return Case(
        instruction=rng.choice(UNFINISHED).format(names=listed(list(logs)), out=out),
        files={**logs, **files},
        absent=(out,),
        steps=(f"{pipe} > {out}",),
        checks=(is_plain_file(out), holds_lines(out, hanging)),
        goal=f"{out} lists {listed(hanging)}, one a line.",
        guards="Jobs that start in one file and finish in another are not hanging.",
    )


OPERATIONS: dict[str, Operation] = {
    "paid_total": _paid_total,
    "most_refunds": _most_refunds,
    "never_ordered": _never_ordered,
    "errors_by_city": _errors_by_city,
    "unfinished": _unfinished,
}
