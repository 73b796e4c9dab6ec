"""Write the generated part of every page in docs/reference/.

python -m tests.reference
"""

from tests.reference import FOLDER, GENERATORS, generate_page


def main() -> None:
    """Rewrite the pages that differ, and print their names."""
    for name in GENERATORS:
        committed, generated = generate_page(name)
        if committed != generated:
            (FOLDER / name).write_text(generated, encoding="utf-8")
            print(f"docs/reference/{name}: rewritten")


if __name__ == "__main__":
    main()
