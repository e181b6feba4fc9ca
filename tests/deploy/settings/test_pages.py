"""What people read about settings is what the table says. After a change: python -m intarsia.deploy.settings.pages"""

from intarsia.deploy.settings.pages import PAGE, PROGRAM, page, with_arguments


def test_the_page_of_settings_is_made_of_the_table():
    assert PAGE.read_text() == page()


def test_the_docstring_of_the_offline_api_is_made_of_the_table():
    program = PROGRAM.read_text()
    assert program == with_arguments(program)
