# ruff: noqa: E501 (a pattern is one line, however long)
"""Words of the prompt generators, as data: a list is one string, alternatives parted by ``|``.

All of it was written for this project.
"""

__all__ = ["WORDS"]

WORDS: dict[str, str] = {
    "person": "Amara|Ben|Chloe|Diego|Elif|Farid|Grace|Hiro|Ingrid|Jamal|Keiko|Leo|Mei|Nadia|Omar"
    "|Petra|Quinn|Rosa|Samir|Tanya|Ugo|Vera|Wen|Ximena|Yusuf|Zoe|Anna|Bruno|Carla|Dmitri|Esther"
    "|Felix|Gwen|Hassan|Isla|Jonas|Kofi|Lena|Marcus|Nora|Oscar|Priya|Rafael|Sofia|Theo|Uma|Viktor"
    "|Willa|Yara|Aaron|Bella|Callum|Daisy|Ethan|Fiona|George|Hannah|Ivan|Julia|Kevin|Lucy|Mason"
    "|Nina|Oliver|Paula|Ryan|Sarah|Tyler|Valerie|Walter|Mrs. Alvarez|Mr. Okafor|Ms. Lindqvist"
    "|Mr. Tanaka|Mrs. Brandt|Coach Rivera|Uncle Pete|Grandma Ruth",
    "thing": "apples|marbles|stickers|books|pencils|cookies|trading cards|seashells|buttons|stamps"
    "|balloons|muffins|oranges|beads|postcards|coins|crayons|toy cars|peaches|candles|comic books"
    "|plums|paper cranes|tennis balls|cupcakes|ribbons|notebooks|keychains|walnuts|puzzle pieces"
    "|bottle caps|bracelets|lemons|acorns|tickets|eggs|magnets|figurines|badges|potatoes",
    "ware": "mugs|T-shirts|lamps|backpacks|umbrellas|hats|board games|plants|scarves|headphones"
    "|water bottles|chairs|picture frames|towels|flashlights|cushions|calendars|belts|teapots"
    "|sunglasses|phone cases|skateboards|blankets|clocks|paint sets|wallets|sandals|kites",
    "single": "mug|T-shirt|lamp|backpack|umbrella|hat|board game|scarf|water bottle|chair|towel"
    "|flashlight|cushion|calendar|teapot|kite|blanket|clock|wallet|notebook|candle|poster",
    "food": "pizzas|sandwiches|pancakes|tacos|dumplings|salads|burgers|smoothies|bagels|pies|waffles"
    "|spring rolls|soups|omelettes|brownies|scones",
    "drink": "lemonade|orange juice|iced tea|apple cider|milk|hot chocolate|coffee|coconut water",
    "animal": "chickens|goats|sheep|cows|ducks|rabbits|horses|geese|pigs|alpacas|turkeys|llamas",
    "pet": "dog|cat|hamster|rabbit|parrot|guinea pig|turtle|canary|goldfish|ferret",
    "crop": "tomato|pepper|corn|bean|strawberry|pumpkin|lettuce|carrot|onion|sunflower",
    "vehicle": "train|bus|truck|car|cyclist|ferry|delivery van|motorcycle|tram|cargo ship",
    "job": "mows lawns|walks dogs|tutors students|washes cars|babysits|delivers newspapers"
    "|designs logos|repairs bicycles|paints fences|stocks shelves|waits tables|translates letters"
    "|fixes computers|teaches guitar lessons|bakes bread for a cafe|edits videos",
    "worker": "a painter|a baker|a tailor|a carpenter|a printer|a gardener|a typist|a machine"
    "|a potter|a mechanic|a robot|a mason|a florist|a weaver",
    "product": "toys|chairs|shirts|bricks|pots|cakes|circuit boards|envelopes|bottles|candles|boxes"
    "|keyboards|tiles|baskets|loaves|screws|lamps",
    "goal": "a bicycle|a tablet|a guitar|a camera|a tent|a telescope|a drone|a sewing machine"
    "|a video game console|a trip to the coast|a pair of skis|a microscope|a piano keyboard",
    "place": "library|museum|zoo|theater|stadium|cinema|aquarium|concert hall|school fair|market"
    "|swimming pool|planetarium|gym|amusement park|gallery|community center",
    "shop": "bakery|bookstore|toy shop|grocery|hardware store|flower shop|cafe|pet shop|music store"
    "|stationery store|farm stand|sports shop|thrift store|candy store",
    "event": "birthday party|school picnic|wedding|charity run|neighborhood barbecue|science fair"
    "|book club meeting|family reunion|graduation dinner|bake sale|chess tournament|hiking trip"
    "|team celebration|art exhibition|housewarming|office lunch",
    "container": "box|bag|crate|basket|jar|tray|carton|bin|packet|drawer",
    "material": "cloth|rope|ribbon|wire|wood|pipe|paper|fencing|hose|cable",
    "activity": "reading|running|swimming|practicing piano|painting|coding|gardening|cycling|knitting"
    "|studying Spanish|playing chess|drawing|hiking|cooking|juggling|dancing",
    "unit": "meters|miles|kilometers|feet|yards",
    "day": "Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday",
    "month": "January|February|March|April|May|June|July|August|September|October|November|December",
    "frac": "half|a third|a quarter|a fifth|two thirds|three quarters|two fifths",
    "pct": "5%|10%|12%|15%|20%|25%|30%|35%|40%|50%|60%|75%",
    "var": "x|y|n|t|a|m|k",
    # Chat: subjects that a small model has something to say about.
    "topic": "photosynthesis|gravity|the water cycle|black holes|inflation|the French Revolution"
    "|machine learning|the immune system|plate tectonics|supply and demand|the Roman Empire|DNA"
    "|renewable energy|the solar system|vaccines|the internet|evolution|democracy|volcanoes"
    "|the human heart|recycling|compound interest|electricity|the Renaissance|climate change|sleep"
    "|the stock market|magnets|rainbows|bees and pollination|the digestive system|encryption"
    "|the Industrial Revolution|tides|operating systems|quantum mechanics|ecosystems|the Cold War"
    "|nutrition labels|3D printing|earthquakes|fermentation|the printing press|habits|batteries"
    "|the Silk Road|antibiotics|GPS navigation|the ozone layer|jazz music|the carbon cycle|memory"
    "|semiconductors|ocean currents|human rights|probability|the periodic table|hurricanes"
    "|the nervous system|artificial intelligence|haiku poetry|ancient Egypt|solar panels|coral reefs"
    "|the scientific method|blockchain|the Great Wall of China|glaciers|relativity|cell division"
    "|the United Nations|cloud computing|migration of birds|impressionism|the Magna Carta|fungi"
    "|heat pumps|dinosaurs|logarithms|the placebo effect|taxes|the moon landing|soil erosion"
    "|sound waves|the human genome|microplastics|Newton's laws|the Aztecs|opera|data compression"
    "|the Olympic Games|nuclear fusion|desalination|mirrors and lenses|the water table|chess openings"
    "|public speaking|time zones|leap years|map projections|steam engines|satellites|honey"
    "|the speed of light|caffeine|crop rotation|tree rings|search engines|bridges|the Vikings"
    "|supply chains|hydroponics|bacteria|the Black Death|credit scores|the alphabet|sourdough bread"
    "|recursion|binary numbers|HTTP|databases|unit testing|version control|hash tables|caching"
    "|sorting algorithms|neural networks|compilers|virtual memory|open source software|APIs",
    "pair": "cats and dogs|tea and coffee|Python and JavaScript|cities and small towns|books and films"
    "|solar and wind power|renting and buying a home|bicycles and cars|plants and animals"
    "|lakes and oceans|trains and planes|online and classroom learning|saving and investing"
    "|lists and tuples in Python|TCP and UDP|weather and climate|mitosis and meiosis"
    "|vegetarian and vegan diets|fiction and non-fiction|running and swimming|comets and asteroids"
    "|SQL and NoSQL databases|violins and cellos|butterflies and moths|gas and electric stoves"
    "|frogs and toads|introverts and extroverts|compilers and interpreters|viruses and bacteria"
    "|debit and credit cards|laptops and tablets|desert and rainforest climates|poetry and prose"
    "|leadership and management|stacks and queues|wool and cotton|crocodiles and alligators"
    "|summer and winter sports|processes and threads|jam and marmalade|essays and reports"
    "|freelancing and full-time work|observation and experiment|monarchies and republics",
    "audience": "a five-year-old|a ten-year-old|a high school student|a college freshman|my grandmother"
    "|a complete beginner|a busy manager|someone who hates science|a new employee|a curious tourist"
    "|a class of teenagers|a friend with no technical background|a journalist|an expert in a hurry"
    "|a language learner|a parent|a job candidate|a retired engineer|a policy maker|a hobbyist",
    "length": "two sentences|three sentences|one paragraph|two short paragraphs|about 100 words"
    "|fewer than 50 words|about 150 words|at most five sentences|five bullet points|a short list"
    "|no more than 80 words|four steps|about 200 words|three bullet points|a single sentence"
    "|a numbered list of six items",
    "tone": "friendly|formal|humorous|encouraging|calm|dramatic|concise|poetic|polite|enthusiastic"
    "|professional|warm|matter-of-fact|playful|serious|persuasive",
    "role": "a pirate captain|a museum guide|a patient math teacher|a travel agent|a medieval knight"
    "|a detective|a chef|a sports commentator|a librarian|a doctor|a robot from the future"
    "|a personal trainer|a gardener|a wise old owl|a job interviewer|a news anchor|a stand-up comedian"
    "|a historian|an astronaut|a lighthouse keeper|a bus driver|a startup founder|a poet|a wizard"
    "|a customer support agent|a ship's cook|a beekeeper|a philosopher|a park ranger|a tailor",
    "problem": "I keep losing my keys|I cannot fall asleep at night|my houseplants are dying"
    "|I am nervous about a job interview|my neighbor plays loud music|I procrastinate on homework"
    "|I want to save money on groceries|my new puppy chews everything|I forget people's names"
    "|I feel tired every afternoon|I have to give a speech next week|my computer is very slow"
    "|I want to learn to cook|I am moving to a new city|I argue with my brother a lot"
    "|I spend too much time on my phone|I want to run my first 5K|my desk is always messy"
    "|I have trouble focusing while reading|I want to make new friends|my bread never rises"
    "|I am learning English and my vocabulary is small|I want to switch careers"
    "|my team misses deadlines|I am planning a trip with small children|I need a hobby"
    "|my code is hard to read|I get headaches from my screen|my garden has too many weeds"
    "|I want to write a novel but never start|I am bad at small talk|my bicycle squeaks"
    "|I eat too much sugar|I want to wake up earlier|I have two exams on the same day",
    "project": "a weekly meal plan|a beginner's workout routine|a study schedule for exams"
    "|a small vegetable garden|a budget for a student|a weekend in Lisbon|a surprise party"
    "|a neighborhood cleanup|a personal website|a school newspaper|a podcast about history"
    "|a rainy day with kids|a first camping trip|a book club|a charity concert|a home library"
    "|a morning routine|a science fair project|a road trip|a family game night|a job search"
    "|a small online shop|a language exchange|a tiny balcony garden|a chess club|a bake sale",
    "storyseed": "a lost key|a dragon who is afraid of fire|the last library on Earth|a talking cat"
    "|a lighthouse in a storm|two rival bakers|a robot that learns to paint|a hidden door"
    "|a letter that arrives fifty years late|a village without clocks|a girl who collects clouds"
    "|a train that never stops|an old map|a shy ghost|the first day on Mars|a broken violin"
    "|a fox and a snowman|a mysterious neighbor|a forgotten birthday|a river that flows uphill"
    "|a clumsy wizard|a night market|a message in a bottle|a time-travelling postman"
    "|a garden on the moon|a wolf who wants to be a vegetarian|a very small giant|a stolen recipe"
    "|a bridge between two worlds|an honest thief|a snow day|a clock that runs backwards",
    "genre": "mystery|fairy-tale|science fiction|comedy|adventure|fantasy|bedtime|ghost|detective"
    "|historical|western|fable-like|slice-of-life",
    "form": "short story|poem|haiku|dialogue|limerick|diary entry|song chorus|fable|monologue|news report"
    "|letter|riddle|product description|speech|movie synopsis|postcard",
    "mailreason": "asking for a day off|thanking a colleague for their help|inviting a friend to dinner"
    "|complaining about a late delivery|applying for a summer job|apologizing for a missed meeting"
    "|requesting a refund|announcing a new product|asking a teacher for extra time|cancelling a gym"
    " membership|proposing a new project|following up after an interview|welcoming a new team member"
    "|reporting a broken heater to the landlord|asking for a raise|declining an invitation"
    "|introducing yourself to the neighbors|reminding the team about a deadline"
    "|recommending a former student|asking for directions to an office|congratulating a coworker"
    "|ordering office supplies|rescheduling a doctor's appointment|asking for feedback on a draft",
    "listof": "ways to save water at home|healthy snacks|questions to ask in a job interview"
    "|books every child should read|tips for better sleep|uses for an old T-shirt|ice breaker questions"
    "|things to pack for a beach trip|names for a bakery|renewable energy sources|team building games"
    "|ways to say thank you|facts about penguins|cheap dinner ideas|indoor exercises|common spices"
    "|ways to reduce stress|programming project ideas|famous inventors and their inventions"
    "|European capitals|types of clouds|hobbies that cost nothing|mistakes new drivers make"
    "|rules for a shared kitchen|gift ideas for a teacher|musical instruments and their families"
    "|animals that hibernate|science experiments for kids|slogans for a recycling campaign"
    "|steps to change a bicycle tire|synonyms for 'happy'|words that rhyme with 'light'"
    "|ways to use leftover rice|famous rivers and their countries|tips for taking better photos"
    "|names for a black cat|topics for a debate|ways to learn vocabulary|good habits for programmers"
    "|Python built-in functions|HTML tags|keyboard shortcuts|data structures|Linux commands",
    "statement": "Homework should be abolished|Everyone should learn to code|Cars should be banned from"
    " city centers|School should start later in the morning|Zoos do more good than harm"
    "|Working from home is better than working in an office|Social media makes people lonely"
    "|Public transport should be free|Breakfast is the most important meal of the day"
    "|Money can buy happiness|Robots will create more jobs than they destroy|Art should be a required"
    " subject|Exams are a fair way to measure learning|Space exploration is worth its cost"
    "|Children should do chores|Paper books are better than e-books|Tourism harms cities"
    "|A four-day work week is a good idea|Fast food should be taxed|Voting should be mandatory",
    "question": "Why is the sky blue|How do airplanes stay in the air|Why do cats purr"
    "|What causes thunder|How does a refrigerator work|Why do leaves change color in autumn"
    "|What is the difference between a star and a planet|How do fish breathe under water"
    "|Why do we dream|How is paper made|What makes bread rise|How does a microwave heat food"
    "|Why is the sea salty|How do vaccines work|What is a black hole|How do plants drink water"
    "|Why do we have seasons|How does a bicycle stay upright|What is an algorithm|Why do onions make"
    " us cry|How are mountains formed|What is the purpose of a constitution|How does soap clean"
    "|Why do birds sing|How do noise-cancelling headphones work|What is a prime number"
    "|How do computers store numbers|Why does ice float|How does a lock work|Why do stars twinkle"
    "|What is a leap year|How do touch screens work|What is inflation|How is glass made"
    "|How do bees make honey|Why does metal feel colder than wood|What is an operating system"
    "|How does a camera focus|Why do we yawn|How do tides work|How does a search engine find pages",
    "language": "French|Spanish|German|Italian|Portuguese|Dutch|Latin|Swedish",
    "phrase": "Where is the train station?|I would like a cup of tea, please.|The weather is nice today."
    "|My brother works in a hospital.|We are going to the market tomorrow.|Thank you for your help."
    "|How much does this cost?|The book is on the table.|I am learning to cook.|She likes old music."
    "|Can you help me find my bag?|The children are playing in the garden.|I am happy to meet you."
    "|They arrived late because of the rain.|What time does the museum open?|I forgot my umbrella.",
    "city": "Paris|Tokyo|Cairo|Lima|Oslo|Nairobi|Toronto|Sydney|Rome|Seoul|Vienna|Mumbai|Boston|Dublin"
    "|Istanbul|Athens|Bangkok|Havana|Prague|Denver|Kyoto|Cape Town|Buenos Aires|Helsinki",
    "adj": "bright|fragile|ancient|gentle|sturdy|bitter|curious|noisy|elegant|tiny|generous|dull|brave|smooth"
    "|peculiar|cheerful|heavy|rapid|modest|vivid|humble|sharp|gloomy|reliable|shallow|colorful|stubborn",
    "country": "Brazil|Japan|Kenya|Norway|Canada|Egypt|India|Mexico|Greece|Peru|Vietnam|Poland|Morocco|Chile"
    "|Iceland|Turkey|Portugal|Nigeria|Indonesia|New Zealand|Switzerland|Argentina|Thailand|Ireland|Cuba",
    "figure": "Marie Curie|Isaac Newton|Cleopatra|Leonardo da Vinci|Ada Lovelace|Nelson Mandela|Galileo"
    "|Florence Nightingale|Charles Darwin|Mozart|Amelia Earhart|Aristotle|Frida Kahlo|Albert Einstein"
    "|William Shakespeare|Rosa Parks|Alan Turing|Genghis Khan|Jane Austen|Nikola Tesla|Confucius"
    "|Joan of Arc|Beethoven|Marco Polo|Gandhi|Katherine Johnson|Julius Caesar|Harriet Tubman|Socrates",
    "trade": "nurse|software engineer|carpenter|teacher|graphic designer|electrician|pilot|accountant"
    "|translator|pharmacist|photographer|farmer|architect|firefighter|biologist|plumber|journalist",
    # Code: what a task is about.
    "arrange": "LEVEL|BANANA|MATH|COFFEE|APPLE|PUZZLE|TREE|BALLOON|SUMMER|KITTEN|PEPPER|ORANGE|TOTAL",
    "color": "red|blue|green",
    "base": "two|three|five|seven|eight|sixteen",
    "three": "three|four|five|seven",
    "args": "items|text|a, b|path|values, limit|name, age|rows|n|words, separator|start, end",
    "csvgoal": "the most expensive item|the average price|the items of each city|the rows sorted by price"
    "|the number of rows|the total price of each city|the row with the longest name",
    "noun": "bank account|shopping cart|library|playlist|to-do list|chess board|parking lot|recipe|matrix"
    "|student|stopwatch|inventory|deck of cards|address book|polynomial|rectangle|linked list|timer"
    "|graph|movie|calendar|ticket machine|temperature sensor|phone book|elevator|text file|vector",
    "verb": "add an item|remove an item|count the items|find an item by name|sort the items|reset it"
    "|save it to a file|load it from a file|merge it with another one|copy it|filter it by a condition"
    "|convert it to JSON|compare it with another one|validate it|compute its total",
    "argument": "a list of integers|a string|two lists of equal length|a dictionary of prices|a sentence"
    "|a list of words|a positive integer|a list of tuples|a nested list|two strings|a matrix"
    "|a list of dates as strings|a file path|a list of floats|a dictionary that maps names to ages"
    "|a list of dictionaries|a binary string|a date in the form YYYY-MM-DD|a set of numbers",
    "returned": "the largest difference between two elements|the number of distinct elements"
    "|the elements that occur more than once|the second largest element|the items in reverse order"
    "|True if it is sorted and False otherwise|a dictionary with the count of each element"
    "|the longest run of equal elements|the sum of all numbers in it|the most common element"
    "|a copy without duplicates|the median|the elements at even positions|the average|its length"
    "|a list of the running totals|the first element that is not repeated|a string of its parts joined"
    " by commas|the index of the smallest element|the items grouped by their first letter"
    "|the items split into chunks of three|a sorted copy|the items in pairs|the product of all numbers"
    "|the items rotated by two places|the longest item|a readable summary of it",
    "codeextra": "type hints|a docstring with an example|error handling for bad input|three test cases"
    "|comments on each step|a recursive version as well|a version without built-in functions"
    "|an explanation of its complexity|a main function that shows its use",
    "howto": "read a file line by line|sort a dictionary by its values|merge two dictionaries"
    "|reverse a string|remove duplicates from a list|flatten a nested list|parse JSON"
    "|format a float with two decimals|count the words of a text|find the position of an item in a list"
    "|catch an exception|write to a CSV file|measure how long a function takes|make a virtual environment"
    "|zip two lists together|convert a string to a date|generate random numbers|iterate over two lists"
    "|check whether a key is in a dictionary|copy a list|use default arguments safely"
    "|split a string on several characters|round numbers|write a decorator|use a context manager"
    "|read command line arguments|transpose a matrix|find all files with an extension|join paths"
    "|use enumerate|sort a list of tuples by the second item|make an HTTP request|use a generator"
    "|swap two variables|slice a list|filter a list by a condition|pad a number with zeros",
    "pypair": "a list and a tuple|`is` and `==`|append and extend|a shallow and a deep copy|a set and a list"
    "|`return` and `print`|a class method and a static method|`sort` and `sorted`|a module and a package"
    "|`break` and `continue`|args and kwargs|an iterator and an iterable|`str` and `repr`"
    "|a function and a method|a list comprehension and a generator expression|a thread and a process",
    "concept": "list comprehensions|decorators|generators|recursion|exceptions|inheritance|closures"
    "|lambda functions|f-strings|context managers|type hints|dataclasses|slicing|scope of variables"
    "|dictionaries|sets|the `with` statement|modules|iterators|polymorphism|unit tests|async functions"
    "|map and filter|default arguments|unpacking|string methods|file handling|regular expressions",
    "sqlgoal": "the ten most expensive rows|the average price by city|all names that occur more than once"
    "|the newest row of each city|the cities with more than five rows|rows created in the last week"
    "|the total price per month|names that begin with the letter A|the second highest price"
    "|rows without a city|the number of rows per city, sorted",
    "table": "orders|products|customers|tickets|books|rooms|events|invoices|shops|cars",
    "regexgoal": "a phone number like 555-123-4567|an email address|a date like 2024-05-31|a hex color"
    "|a word that starts with a capital letter|a time like 23:59|an IPv4 address|a number with decimals"
    "|a line that ends with a question mark|repeated words|a postal code of five digits|a hashtag"
    "|text in double quotes|a Python variable name|an URL",
    "shellgoal": "counts the lines of all Python files in a folder|finds files larger than 100 MB"
    "|renames all .txt files to .md|shows the ten most common words of a file|copies a folder to a server"
    "|lists the processes that use most memory|replaces a word in all files of a folder"
    "|shows the last 20 lines of a log and follows it|compresses a folder|finds empty folders",
    "gamegoal": "guesses a number between 1 and 100|plays rock, paper, scissors against the computer"
    "|finds the way through a maze of text|guesses the letters of a hidden word|rolls dice until one side"
    " wins|answers math questions against the clock|plays tic-tac-toe|collects coins on a grid",
    "fname": "clean_text|total_price|merge_scores|split_groups|find_gap|count_votes|rank_items|parse_row"
    "|shift_letters|pair_up|top_three|next_date|is_valid_code|group_by_key|compress|score_word",
    "pyerror": "IndexError: list index out of range|KeyError: 'name'|TypeError: unsupported operand type(s)"
    " for +: 'int' and 'str'|NameError: name 'total' is not defined|IndentationError: unexpected indent"
    "|AttributeError: 'NoneType' object has no attribute 'append'|ValueError: invalid literal for int()"
    " with base 10: 'abc'|ZeroDivisionError: division by zero|RecursionError: maximum recursion depth"
    " exceeded|ModuleNotFoundError: No module named 'requests'|SyntaxError: invalid syntax"
    "|UnboundLocalError: local variable 'count' referenced before assignment"
    "|FileNotFoundError: [Errno 2] No such file or directory: 'data.csv'",
    "algorithm": "binary search|bubble sort|merge sort|quicksort|insertion sort|breadth-first search"
    "|depth-first search|Dijkstra's algorithm|the sieve of Eratosthenes|Euclid's algorithm"
    "|the Caesar cipher|run-length encoding|matrix multiplication|a stack with a list|a queue with two"
    " stacks|a linked list|a binary tree with insertion|topological sorting|a moving average"
    "|the knapsack problem with dynamic programming|the longest common subsequence|counting sort"
    "|a priority queue|linear regression|a word frequency counter|a tokenizer for arithmetic|a trie"
    "|the Fibonacci sequence with memoization|selection sort|two-sum with a dictionary|heapsort"
    "|a least-recently-used cache|roman numeral conversion|a bracket checker|a leap year test",
    "toolgoal": "counts the words of a file|renames photos by date|converts Celsius to Fahrenheit"
    "|downloads a list of web pages|splits a bill among friends|tracks daily expenses|generates passwords"
    "|finds duplicate files|converts CSV to JSON|prints a calendar|resizes images|plans a study schedule"
    "|quizzes the user on vocabulary|checks whether web sites are up|merges text files|sorts a music folder"
    "|converts between units|keeps a reading list|simulates a queue in a shop|draws a bar chart as text",
}
