r"""Further answers that cheat, and fair ones, of kinds that the families beside this module do not have.

Of the math answers, macros and colours, homoglyphs, limits of notation (determinants, signs of currency),
expressions that agree at whole numbers only, and golds that are no numbers. `{g}` and `{m}` as in
`adversarial_gsm8k`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.support.adversarial_gsm8k import GOLDS, OTHERS

MATH_CHEATING: dict[str, Sequence[str]] = {
    "5": (
        r"\def\x{5}\x", r"\textcolor{red}{7}5", r"\color{white}7 5", r"\rlap{7}5", r"\hspace{7em}5 7", "７5",
        "٥", "Ⅴ", r"\verb|5|7", r"\iffalse 7 \fi 5 7", r"\hat{5}", r"\vec{5}", r"\tilde{5}", r"\dot{5}",
        r"5^\ast", r"5^\dagger", "5^T", r"\stackrel{?}{=} 5", r"\underbrace{7}_{5}", r"\xrightarrow{7} 5",
        r"\substack{5\\7}", r"\begin{cases} 5 \\ 7 \end{cases}",
        r"\begin{cases} 5 & x > 0 \\ 7 & x \le 0 \end{cases}", "5 < 6", "4 < 5 < 6", r"5 \to \infty",
        r"5 \pmod 7", r"5 \mod 3", r"5\text{ mod }7", r"5 \pm 0.1", r"5 \pm 7", r"\doteq 5", r"\simeq 5",
        r"\asymp 5", r"\max(5, 7)", r"\gcd(5, 7)", r"\operatorname{lcm}(5, 7)", "5 + 0.001i", r"\Re(5+7i)",
        "5_{16}", "0b5", "0o5", r"5 \cdot 10^{-1}", "5e-1", "5E2", "5 – 7", "5~7", r"5\text{th root of }7",
        "5:00", r"5\text{ p.m. or }7", "5:7", "5/7", "(5, 0)", r"5\hat{i}", r"\langle 5, 7 \rangle",
        r"5 \otimes 7", r"5 \oplus 7", r"\{5\} \cup \{7\}", r"\mathbb{R} \setminus \{5\}", r"x \neq 5",
        r"\{x : x > 5\}", r"\{5, \ldots\}", r"5 \notin S", r"\text{if } x = 5", r"5\text{ when }x = 7",
        r"\text{either }5", r"5\text{ unless }x=1", r"\text{less }5", r"\text{without }5",
        r"\text{greater than }5", r"\infty - \infty + 5", r"5 + 0 \cdot \infty", r"\frac{0}{0} + 5",
        r"5 \cdot \frac{\infty}{\infty}", r"5 + \ln 0", r"\frac{5}{0}", r"5 + \tan 90^\circ", "9^{9^{9^9}}",
        r"5 \uparrow\uparrow 2", r"5 \circ 7", r"5 \star 1", r"5 \div 1 \div 5", r"5 \wedge 7", r"5 \& 7",
        r"5 \# 7", "5 @ 7", r"\frac{d}{dx} 5", r"\int_0^1 5\,dx - 1", r"\lim_{x\to 7} x",
        r"5 \text{ (mod 7)}", r"\sqrt{-25}", r"\sqrt{5^2}i", "|5 - 7|",
        r"5 \cos(2\pi x) + x - x + \sin(\pi x)", "five hundred", r"\text{five or six}", "5 = x^2", "2x = 5",
        "x + 1 = 5", "x^5", r"\log 5", "P(5)", "5P", r"5 \text{ out of } 7", r"1\text{ in }5",
        r"5\text{ times }7", r"5\text{ plus }7", r"5\text{ point }7",
    ),
    "0": (
        r"\sin(\pi x)", "x(x-1)(x+1)", r"\tan(\pi x)", "x - |x|", "O", "o", r"\text{zero or one}", "0^-",
        "0^+", r"\frac{0}{0}", r"\log 0", "x^0", "10^{-50} x", r"\varepsilon", "0!", "-0.0000001",
        r"0 \cdot \infty", r"\text{nonzero}",
    ),
    "1": (
        r"\cos(2\pi x)", r"\frac{x}{|x|}", r"0^0 + x - x + \sin(\pi x)", r"1^x + \sin \pi x", "l", "I",
        r"\text{one or two}", r"\mathbf{I}", r"\frac{1}{1+10^{-30}}", "0.9999999999", r"0.\overline{9}8",
        "i^2", r"\pm 1", r"1 \text{ or } -1", r"\sgn x", r"\det I_7 \cdot 7",
    ),
    "x": (
        "|x|", r"\sqrt{x^2}", r"\sin x", "x + 10^{-40}", "1.0000000000001 x", r"\lfloor x \rfloor",
        r"x + \sin(\pi x)", "x + (x-1)(x-2)(x-3)(x-4)(x-5)(x-6)", r"\bar{x}", "x'", r"x \bmod 7",
        r"\frac{x^2}{y}", "y", "x_1", r"\Re x", "x^{1.0000001}", r"\arcsin(\sin x)", "x!", r"\ln e^{|x|}",
    ),
    r"\sin^2 x": (
        r"\sin x^2", r"\sin(\sin x)", r"\sin 2x", r"1 - \cos x", r"\sin^{2} y", r"\sin^{-2} x", r"\cos^2 x",
        r"2 \sin x",
    ),
    r"\tan x": (
        r"\tan^{-1} x", r"\arctan x", r"\cot x", r"\frac{\sin x}{\cos y}", r"\tan y", r"\tan x + \pi",
        r"\tanh x", r"\tan |x|",
    ),
    r"\ln 2": (
        r"\log 2", r"\log_2 2", r"\ln 2 + 10^{-30}", "0.6931", r"\ln 2x", r"\ln -2", r"\ln 2 i", r"\lg 2",
        r"-\ln 2", r"\ln \frac12",
    ),
    r"\frac{3}{4}": (
        r"\frac{3}{4}/4", "3/4/4", r"\frac{34}{44}", r"\frac{30}{4}0", r"\frac{3}{4}\text{ of }8",
        r"\frac{4}{3}", r"3 \frac{1}{4}", r"\frac{3}{4!}", r"\frac{3!}{4}", r"\frac{3}{4}^2",
        r"\sqrt{\frac34}", r"\binom{3}{4}", "3{4}", r"\frac{\frac34}{x}", r"0.7\overline{5}",
        "0.75000000001", r"\frac{-3}{4}", r"\frac{3}{-4}", "75", "7.5", "3:4:5", r"3 \text{ fourths of }2",
    ),
    r"2\frac13": (
        r"2 \cdot \frac13", "2/1/3", r"\frac{21}{3}", r"2\frac{1}{-3}", r"-2\frac13", r"2 - \frac13",
        r"2^{\frac13}", r"2_{\frac13}", "2.13", "2.3", r"2\frac31",
    ),
    r"0.\overline{3}": (
        "0.3", "0.33", r"0.\overline{30}", r"0.3\overline{0}", r".\overline{03}", r"0.\overline{34}",
        r"3.\overline{3}", r"\overline{0.3}4", r"0.\overline{3}\%",
    ),
    "1+i": (
        "1-i", "i", r"\overline{1+i}", "|1+i|", "1+j", "-1-i", "1+i^2", "i(1+i)", r"1+\sqrt{1}",
        r"e^{i\pi/4}", r"\Re(1+i)", "1 i", "1,i",
    ),
    "(2,3)": (
        r"2 \le x \le 3", "(2,3]", "[2,3)", "(3,2)", "x > 2", r"\{2,3\}", r"(2,3) \cup (4,5)", "(2;3;4)",
        "2 < x, x > 3", r"\langle 3, 2 \rangle", "(2,3)'", "(2,3) + 1", "2(2,3)", "(2,3)^2", "-(2,3)",
        r"(2\text{ or }3)", "(2, 3, )4", "(2.3)", "(23)",
    ),
    "y = 2x + 3": (
        r"y \approx 2x+3", "2y = 2x+3", "0 = 0", "y = y", "y - 2x = -3", "y = 2|x| + 3",
        r"y = 2x + 3\text{ or }y = 0", "y(y - 2x - 3) = 0", "y^2 = (2x+3)^2", "y = 2x + 3z", "y = 2^x + 3",
        "y = 2(x + 3)", r"\frac{y}{0} = 2x + 3", "x = 2y + 3, y = 2x + 3",
    ),
    r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}": (
        r"\begin{vmatrix} 1 & 2 \\ 3 & 4 \end{vmatrix}", r"\begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}",
        r"-\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}^T",
        r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}^{-1}",
        r"2\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", "(1,2,3,4)", "1, 2, 3, 4",
        r"\begin{pmatrix} 1 & 2 & 3 & 4 \end{pmatrix}", "-2", r"\begin{pmatrix} 12 \\ 34 \end{pmatrix}",
    ),
    r"10\text{ cm}": (
        r"10\text{ mm}", r"100\text{ cm}", r"10\text{ inches}", r"10\text{ cm per second}",
        r"10\text{ cm}^3", r"10^{\text{cm}}", r"10\text{ cubic cm}", r"1\text{ cm}0", r"10\text{ cm or m}",
        r"\frac{10}{\text{cm}}",
    ),
    r"\$150": (
        r"150\text{ cents}", "€150", r"\$1.50", r"\$150\text{ million}", r"\$-150", r"150\%",
        r"\$150\text{ each for 2}",
    ),
    r"60^\circ": (
        "60'", "60''", r"60^{\circ\circ}", r"60^{\circ}^2", r"-60^\circ", r"60\text{ rad}", r"300^\circ",
        r"\sin 60^\circ", r"420^\circ", "60^{0}", r"60\%",
    ),
    r"\text{Evelyn}": (
        r"\text{Evelyn or Briana}", r"\text{not Evelyn}", r"\text{Evelyn's sister}", "E", r"\text{Eve}",
        r"\text{nylevE}", r"\text{Evelyn, Briana}", r"\text{Briana (not Evelyn)}",
        r"\text{anyone but Evelyn}", r"\text{Evelyn?}", r"\text{Evelyn is second}",
    ),
    "A": (
        "A^c", "A_1", "A+B", r"\alpha", "AAA", r"A\ B", r"\text{A}\text{B}", r"\text{B, not A}", r"\forall",
        r"A \cup B", r"\emptyset \cup A \cup B", r"A \setminus A", "А Б",
    ),
    "81256": (
        "81, 256", "812, 56", "8,1256", r"81\text{ and }256", "81;256", r"81 \cdot 256", r"81\frac{256}{1}",
    ),
    "81, 256": (
        "81256", "812,56", "8,1256", "81.256", "(81,256)", "256", "81,257", "81,25", "81,256,0",
    ),
}  # fmt: skip

MATH_FAIR: dict[str, Sequence[str]] = {
    "(2,3)": (
        "(2 , 3)", r"\bigl(2,3\bigr)",
    ),
    r"\frac{3}{4}": (
        r"\dfrac{3}{4}", r"\tfrac34", r"\cfrac{3}{4}", r"{3 \over 4}", r"3\div4", r"\frac 3 4",
        r"\frac3{4}", r"\displaystyle\frac{3}{4}", r"\textstyle\frac34", "¾", r"\frac{3}{4}\;", "3/4.",
        r"\frac{\,3\,}{\,4\,}", "0.750", r"\left(\frac34\right)",
    ),
    "5": (
        r"\boxed{5}", r"{\bf 5}", r"\bf 5", r"5\;", r"5~\text{cm}", r"\ensuremath{5}", r"\underline{5}",
        r"\fbox{5}", r"\large 5", r"\textcolor{red}{5}", r"\color{blue}{5}", r"5\text{ (units)}",
        r"\text{Answer: }5", r"\text{Answer: 5}", r"5\text{ students}", r"\mathit{5}", r"\#5",
    ),
    "2,3": (
        r"\left\{2,3\right\}", r"\lbrace 2,3 \rbrace", r"\{2\,,\,3\}", r"\{3,\ 2\}", "x = 2, 3",
        r"x=2 \text{ and } x=3", r"2 \text{ and } 3.",
    ),
    "1500": (
        r"1.5\times10^{3}", r"1.5\cdot 10^3", "1500.", r"1\,500", "1{,}500", r"15\times 10^2", "1,500",
        "1500.0",
    ),
    "odd": (
        r"\textrm{odd}", r"\operatorname{odd}", r"\emph{odd}", r"\textit{odd}", r"\text{Odd}",
        r"\textsf{odd}", r"\text{odd.}",
    ),
    r"\frac{\pi}{6}": (
        r"\pi/6", r"\frac{\pi}6", r"\frac16\pi", r"\tfrac{1}{6}\pi", r"\pi \cdot \frac{1}{6}", "π/6",
    ),
    "e^{2x}": (
        r"\exp(2x)", "(e^{x})^{2}", r"e^{2 \cdot x}", r"\mathrm{e}^{2x}", r"\exp{(2x)}",
    ),
    r"\arctan x": (
        r"\tan^{-1} x", r"\tan^{-1}(x)", r"\arctan(x)",
    ),
    r"\csc x": (
        r"\frac{1}{\sin x}", r"1/\sin x", r"(\sin x)^{-1}",
    ),
    "10": (
        r"{5 \choose 2}", r"\dbinom52", r"\tbinom{5}{2}", r"10\text{ ways}",
    ),
    "|x|": (
        r"\lvert x \rvert", r"\left|x\right|", r"\vert x \vert", r"\sqrt{x^2}",
    ),
    r"x \ge 2": (
        r"x\geq 2", r"x\geqslant 2", r"[2,\infty)", r"x\in[2,\infty)", r"2 \le x", r"[2,+\infty)",
    ),
    r"60^\circ": (
        "60°", r"60\degree", r"60^{\circ}", r"60\,^\circ",
    ),
    r"\sqrt{2}": (
        r"\sqrt 2", "2^{1/2}", r"\sqrt[2]{2}", "2^{0.5}", r"2^{\frac12}", r"\frac{2}{\sqrt2}",
    ),
    r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}": (
        r"\left(\begin{array}{cc} 1 & 2 \\ 3 & 4 \end{array}\right)",
        r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}", r"\begin{pmatrix}1&2\\3&4\\ \end{pmatrix}",
        r"A = \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
    ),
    "81, 256": (
        "81,256", "256, 81", r"81\text{ and }256", "256,81", r"\{81,256\}", "x = 81, 256",
    ),
    "1+i": (
        "i + 1", "1 + 1i", r"\frac{2}{1-i}", r"1+\sqrt{-1}", r"\sqrt2 e^{i\pi/4}",
    ),
    r"2\frac13": (
        r"\frac73", "7/3", r"2 + \frac13", r"2\dfrac{1}{3}", r"2\,\frac{1}{3}", r"2.\overline{3}",
    ),
    r"\mathbb{R}": (
        r"(-\infty,\infty)", r"\Bbb R", r"\mathbb R", r"x \in \mathbb{R}",
    ),
    r"\text{Evelyn}": (
        "Evelyn", r"\text{evelyn}", r"\text{Evelyn.}", r"\mathrm{Evelyn}", r"\textbf{Evelyn}",
    ),
}  # fmt: skip

GSM8K_CHEATING: Sequence[str] = (
    "{g} or thereabouts", "{g} give or take", "{g}±1", "{g} +/- 1", "{g} mod 5", "{g} if it rains",
    "{g} unless {m}", "if {g}", "{g} when x = 2", "{g} minus tax", "{g} plus tax", "{g} less than that",
    "{g} apiece times 2", "{g} in dozens", "{g} tens", "{g} each, {m} in total", "{m} each, {g} in total",
    "{g} (wrong)", "wrong: {g}", "<b>{g}</b>{m}", "<s>{m}</s>{g}", "~~{m}~~ {g}", "{g}<!-- {m} -->{m}",
    "{g}\t{m}", "{g}#{m}", "#{m} {g}", "{g}&{m}", "{g}@{m}", "0{g}.{m}", "{g}_{m}", "${g}-${m}", "${m}.{g}",
    "{g}°{m}'", "{g} h {m} min", "{g}:00", "{g}:{m} am", "{g}/{m}", "{g}÷2", "{g}×2", "{g}·2", "{g} ^ 2",
    "{g}e0 or {m}", "{g}E1", "{g}n", "{g}a", "a{g}", "{g}th of {m}", "top {g}", "page {g} of {m}",
    "x{g} = {m}", "{m}: {g}?", "{g} more", "{g} fewer", "another {g}", "{g} extra", "{g} short", "{g} off",
    "{g} over", "{g} below zero", "{g} under", "{g} BC", "loss of {g} or gain of {m}",
    "{g} squared feet squared", r"{g}\cdot 2", r"\frac{{g}}{2}", r"\frac{2}{{g}}", r"\frac{{g}}{1}+1",
    r"{g}\%\%", r"{g}^{\circ}{m}", r"\pm{g}", r"\neg {g}", r"\text{not }{g}", r"\sim{g}", r"\approx {g}",
    "{g} of {m}", "{g} per {m}", "1 in {g}", "1:{g}", "{g} to 1", "{g}x more", "{g} percent of {m}",
    "{g}% of {m}", "{g} = ?", "? = {g}", "{g} == {m}", "{g} != {m}", "{g} > {m}", "{m} < {g}",
    "not less than {g}", "no fewer than {g}", "a maximum of {g}", "a minimum of {g}", "{g} max", "{g} tops",
    "upwards of {g}", "just under {g}", "almost {g}", "{g}-odd", "some {g}", "{g} at best", "{g} probably",
    "possibly {g}", "perhaps {g}", "unknown ({g})",
)  # fmt: skip

GSM8K_FAIR: Sequence[str] = (
    "The answer is: {g}", "Answer = {g}", "Final Answer: {g}", "Ans: {g}", "answer {g}", "{g} total",
    "Total of {g}", "a total of {g}", "= ${g}", "${g} total", "${g} dollars", "{g} US dollars", "US${g}",
    "{g} eggs", "{g} hours per week", "{g} minutes long", "{g} years old", "{g} inches tall", "{g} mph",
    "{g} lbs", "{g} oz", "{g} sq ft", "{g} ft", "{g} m", "{g} cm", "{g} pieces of candy",
    "{g} slices of pizza", r"\({g}\)", r"\[{g}\]", "$${g}$$", r"\text{{g}}", r"\mathbf{{g}}", "{g}\n",
    "\n{g}\n", "\t{g}", "'{g}'", "“{g}”", "{g} ", "So, {g}.", "Thus {g}", "Hence, {g}.", "He sold {g}.",
    "She has {g} dollars left.", "They will have {g} apples left over.", "It takes him {g} minutes.",
    "He will be {g} years old.", "The cost is ${g}.", "The total number of clips is {g}.",
    "{g} clips in total", "{g} girls", "{g} boys", "{g} dogs", "{g} balloons", "{g} trees", "{g} stickers",
    "{g} marbles", "{g} pencils", "{g} points", "{g} pages", "{g} grams", "{g} calories", "{g} gallons",
    "{g} pints", "{g} yards", "{g} tickets", "{g} students in the class",
)  # fmt: skip


def written_out(table: dict[str, Sequence[str]]) -> list[tuple[str, str, str]]:
    """Return (family, truth, answer)."""
    return [("further", truth, answer) for truth, answers in table.items() for answer in answers]


def filled(templates: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (family, gold, solution)."""
    for gold in GOLDS:
        for template in templates:
            yield "further", gold, template.replace("{g}", gold).replace("{m}", OTHERS[gold])
