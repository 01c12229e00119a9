"""Progress goes to standard error and says each stage once."""

from lamina.cli.progress import loading_progress


def test_a_stage_is_one_line_where_there_is_no_terminal(capsys):
    with loading_progress() as show:
        for fraction in (0.0, 0.5, 1.0):
            show("weights", fraction, "model.safetensors")
        show("compile", 0.0, "")
    captured = capsys.readouterr()
    assert captured.err == "weights model.safetensors\ncompile\n"
    assert not captured.out
