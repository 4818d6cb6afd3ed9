"""Words that may accompany a value without changing it. Any other word makes an answer wrong.

An allowlist is needed: `5 million`, `half of 5`, `not 5` and `5 or more` all contain a 5.
"""

from __future__ import annotations

UNITS = {
    name: kind
    for kind, names in {
        "cm": "cm cms centimeter centimeters centimetre centimetres",
        "mm": "mm millimeter millimeters millimetre millimetres",
        "m": "m meter meters metre metres",
        "km": "km kms kilometer kilometers kilometre kilometres",
        "in": "inch inches",
        "ft": "ft foot feet",
        "yd": "yd yds yard yards",
        "mi": "mi mile miles",
        "s": "s sec secs second seconds",
        "min": "min mins minute minutes",
        "h": "h hr hrs hour hours",
        "day": "day days",
        "week": "week weeks",
        "month": "month months",
        "year": "year years",
        "dollar": "dollar dollars usd",
        "cent": "cent cents",
        "euro": "euro euros eur",
        "g": "g gram grams",
        "kg": "kg kgs kilogram kilograms",
        "mg": "mg milligram milligrams",
        "pound": "pound pounds lb lbs",
        "ounce": "ounce ounces oz",
        "ton": "ton tons tonne tonnes",
        "ml": "ml milliliter milliliters millilitre millilitres",
        "liter": "l liter liters litre litres",
        "gallon": "gallon gallons",
        "quart": "quart quarts",
        "pint": "pint pints",
        "cup": "cup cups",
        "acre": "acre acres",
        "square": "square sq",
        "cubic": "cubic cu",
        "degree": "degree degrees",
        "radian": "radian radians",
        "am": "am",
        "pm": "pm",
        "mph": "mph",
        "km/h": "kmh kph",
        "unit": "unit units",
    }.items()
    for name in names.split()
}

FILLERS = frozenset(
    """
    a all also altogether an and ans answer answers are at be been being by can cost costs does each equal
    equals exactly final finally find for found from get gets getting gives had has have he hence her
    his how in into is it its left length made make makes many must need needs now obtain of on our
    overall per precisely remain remaining result results she should simply so solution solutions spend
    spends such that the their them then there therefore these they this those thus to total us value
    values was we were when which will with would you your area volume perimeter probability number
    numbers sum product average mean median mode count amount distance price speed time age width height
    radius angle slope distinct different possible real positive integer integers ordered whole prime
    respectively correct there's it's deep earn earned earns him long old paid pay pays sold take takes
    tall took wide
    """.split()  # noqa: SIM905
)
"""Words of a sentence around a value: `the answer is`, `we get`, `in total`."""

NOUNS = frozenset(
    """
    animal animals apple apples arrangement arrangements bag bags ball balls balloon balloons banana
    bananas bar bars basket baskets battery batteries bead beads bean beans bear bears bed beds bee bees
    beer beers bike bikes bird birds block blocks book books bottle bottles bowl bowls box boxes boy
    boys bracelet bracelets branch branches bread brick bricks brother brothers brownie brownies bucket
    buckets bus buses bushel bushels button buttons cabbage cabbages cake cakes calorie calories camera
    cameras can candle candles candy candies car card cards carrot carrots case cases cat cats
    caterpillar caterpillars chair chairs cherry cherries chicken chickens child children chip chips
    chocolate chocolates choice choices cigarette cigarettes class classes clip clips clown clowns coin
    coins color colors colour colours combination combinations committee committees container containers
    cookie cookies copies copy cow cows crate crates crayon crayons cupcake cupcakes customer customers
    diagonal diagonals digit digits divisor divisors dog dogs doll dolls donut donuts door doors
    doughnut doughnuts dress dresses drink drinks duck ducks edge edges egg eggs element elements
    elephant elephants employee employees entries entry envelope envelopes eraser erasers face faces
    factor factors fan fans farm farms fish fishes flower flowers fork forks friend friends frog frogs
    fruit fruits function functions game games gift gifts girl girls goal goals goat goats grape grapes
    group groups guest guests gumball gumballs hat hats hen hens hits horse horses hotdog hotdogs house
    houses insect insects invitation invitations item items jar jars jellybean jellybeans jersey jerseys
    key keys kid kids kitten kittens lady ladies lamb lambs lap laps leaf leaves leg legs lemon lemons
    letter letters light lights line lines lion lions loaf loaves man mango mangoes mangos marble
    marbles marker markers match matches meal meals medal medals member members men message messages
    mice monkey monkeys mouse movie movies muffin muffins mushroom mushrooms nail nails necklace
    necklaces newspaper newspapers nickel nickels note notebook notebooks notes orange oranges outfit
    outfits outcome outcomes package packages packet packets page pages paintings painting panda pandas
    paper papers park parking parks part parts passenger passengers path paths peach peaches pear pears
    pebble pebbles pen pencil pencils pennies penny pens people person persons phone phones photo photos
    picture pictures piece pieces pie pies pig pigs pillow pillows pizza pizzas plant plants plate
    plates player players point points potato potatoes present presents problem problems pupil pupils
    puppies puppy question questions rabbit rabbits ribbon ribbons road roads rock rocks room rooms rose
    roses row rows sandwich sandwiches school schools seat seats seed seeds sequence sequences shark
    sharks sheep sheet sheets shell shells ship ships shirt shirts shoe shoes shot shots shrimp side
    sides sister sisters slice slices snack snacks snake snakes soap soaps soda sodas song songs spoon
    spoons squirrel squirrels stamp stamps star stars step steps sticker stickers stick sticks stone
    stones stores store straws straw strawberries strawberry student students subset subsets sweet
    sweets table tables task tasks teacher teachers team teams term terms test tests ticket tickets tile
    tiles tire tires toy toys train trains tree trees triangle triangles trip trips truck trucks turkey
    turkeys turtle turtles tv tvs vase vases vegetable vegetables vertex vertices visitor visitors vote
    votes wallet wallets watermelon watermelons way ways wheel wheels window windows woman women word
    words worker workers yogurt yogurts
    """.split()  # noqa: SIM905
)
"""Nouns for things that word problems count."""

HARMLESS = FILLERS | NOUNS | frozenset(UNITS)

SIGN_WORDS = frozenset(("minus", "negative"))
"""Words that mean `-` before a value."""
POWERS_OF_TEN = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
"""Words that multiply the number before them, with their power of ten."""

CHANGING = (
    SIGN_WORDS
    | frozenset(POWERS_OF_TEN)
    | frozenset(
        """
        not no none never neither nor wrong incorrect false without except excluding unless isn't aren't
        wasn't or either maybe perhaps possibly guess unknown if between versus vs half halves third
        thirds quarter quarters fourth fifth sixth seventh eighth ninth tenth tenths hundredth
        hundredths thousandth thousandths fraction part double doubled twice triple tripled thrice
        quadruple times multiplied divided halved plus added subtracted squared cubed cube root roots
        sqrt cbrt power powers log ln exp sin cos tan abs factorial inverse reciprocal opposite mod
        modulo remainder dozen dozens gross score scores pair pairs couple couples hundreds thousands
        millions billions trillions grand lakh lakhs crore crores more less fewer than least most over
        under above below beyond exceeding maximum minimum up down about approximately approx around
        roughly nearly almost circa close zero one two three four five six seven eight nine ten eleven
        twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty thirty forty fifty
        sixty seventy eighty ninety
        """.split()  # noqa: SIM905
    )
)
"""Words that change a number even if the question contains them: `half of 72`, `72 or more`."""
