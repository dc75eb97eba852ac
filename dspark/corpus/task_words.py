# ruff: noqa: E501 (a pattern is one line, however long)
"""Words and sentence patterns of the prompt generators, as data (the grammar is in `task_grammar`).

A list is one string, alternatives parted by ``|``. A block of patterns has one alternative a line;
``*3`` in front gives it weight 3. ``<slot>`` is replaced as `task_grammar.Grammar` says.
All of it was written for this project.
"""

__all__ = ["FUNCTIONS", "PATTERNS", "WORDS"]

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
}

PATTERNS: dict[str, str] = {
    "math_ask": r"""
*14
*3 Show your work.
*3 Think step by step.
*3 Explain each step.
*2 Let's think step by step and give the final answer as \boxed{...}.
*3 Solve it step by step and put the final answer in \boxed{}.
*2 Reason carefully, then write the answer inside \boxed{}.
*2 Work through the problem one step at a time. End with "The answer is" and the number.
Give only the number.
Write down the equations you use.
*2 First restate what is known, then solve.
Check your answer at the end.
Use short sentences.
Explain it as you would to a student in fifth grade.
Please reason through it in steps and box the result with \boxed{}.
Show the calculation for every step, then state the final answer on a new line.
Answer with a full sentence.
*2 Please show how you got the answer.
Break the solution into numbered steps.
""",
    "math_lead": """
*20
*2 Solve this problem:
Here is a word problem.
Can you help me with this?
*2 Question:
Please solve the following problem.
My teacher gave me this exercise:
Work out the answer.
I am stuck on this homework question:
""",
    "word_problem": """
<Person> buys <a:2-9> <ware> for $<b:4-30> each and <c:2-6> <ware2> for $<d:5-40> each. If <person> pays with <bills:3-9> hundred-dollar bills, how much change is there?
<Person> <job> for $<a:8-25> an hour. Last week <person> worked <b:3-9> hours on <day> and <c:2-8> hours on <day2>. How much did <person> earn?
<Person> <job> for $<a:9-22> an hour and wants to buy <goal> that costs $<b:150-600>. <Person> has already saved $<c:20-120>. How many hours of work are still needed?
A <shop> sells <ware> for $<a:6-45> each. On <day> it sold <b:8-40> of them and on <day2> it sold <c:2-4> times as many. How much money did it take in over the two days?
A <container> holds <a:6-24> <thing>. <Person> has <b:3-15> full <container>es and <c:1-20> loose <thing>. How many <thing> does <person> have in total?
There are <a:12-40> students in a class. Each of them brings <b:2-6> <thing>, and the teacher adds <c:10-50> more. The <thing> are shared equally among <d:3-8> tables. How many <thing> does each table get, and how many are left over?
A <vehicle> travels at <a:30-90> miles per hour for <b:2-6> hours and then at <c:20-70> miles per hour for <d:1-4> hours. How far does it travel altogether?
A <vehicle> leaves at <h:6-9> a.m. and covers <a:120-480> kilometers at an average speed of <b:40-80> kilometers per hour. It stops once for <c:15-45> minutes. At what time does it arrive?
<Person> reads <a:10-45> pages on <day>, twice as many on <day2>, and <b:5-30> pages on <day3>. The book has <c:200-420> pages. How many pages are left to read?
<Person> is <a:6-15> years old. <Person2> is <b:2-4> times as old, and <person3> is <c:2-9> years younger than <person2>. What is the sum of their ages?
In <a:3-12> years <person> will be twice as old as <person2> is now. <Person2> is <b:14-30>. How old is <person>?
A recipe for <b:4-8> people needs <a:2-6> cups of flour. <Person> is cooking for <c:10-40> people. How many cups of flour does <person> need?
A <single> costs $<a:20-160>. It is on sale for <pct> off, and <person> has a coupon for another $<b:2-10>. What does <person> pay?
<Person> bought a <single> for $<a:20-90> and sold it for <pct> more. How much profit did <person> make?
<Worker> makes <a:6-30> <product> an hour. After <b:2-5> hours a second one that makes <c:4-25> <product> an hour joins in. How many <product> have they made after <d:6-10> hours in total?
It takes <person> <a:2-9> hours to paint a room and <person2> <b:3-12> hours. How long does it take if they work together?
A tank holds <a:200-900> liters. It is filled at <b:10-40> liters a minute and leaks <c:1-8> liters a minute. How many minutes does it take to fill?
A farmer has <a:12-60> <animal> and <b:2-4> times as many <animal2>. <Frac> of the <animal2> are sold. How many animals are left on the farm?
<Person> plants <a:4-15> rows of <crop> plants with <b:6-20> plants in each row. <Pct> of the plants do not survive. How many plants are left?
Each <crop> plant gives <a:3-12> kilograms a season, and a kilogram sells for $<b:2-9>. <Person> has <c:15-60> plants and spent $<d:50-200> on seeds and water. What is the profit of the season?
Tickets to the <place> cost $<a:8-24> for adults and $<b:3-12> for children. A group of <c:4-20> adults and <d:6-40> children gets a discount of <pct>. How much does the group pay?
The <place> had <a:120-900> visitors on <day>. On <day2> it had <pct> more visitors, and on <day3> it had <b:20-90> fewer than on <day2>. How many visitors came on the three days?
<Person> runs <a:2-9> <unit> every day except <day>. How many <unit> is that in <b:3-12> weeks?
<Person> spends <a:15-50> minutes a day on <activity> from <day> through <day2> and <b:30-90> minutes on the other days of the week. How many hours is that in <c:2-6> weeks?
For a <event>, <person> orders <a:5-20> <food> cut into <b:4-8> pieces each. There are <c:8-40> guests, and each eats <d:1-4> pieces. How many pieces are left?
For a <event>, <person> needs <a:3-9> liters of <drink> for every <b:8-20> guests. <C:40-120> guests are coming, and a bottle holds 2 liters. How many bottles should <person> buy?
A piece of <material> is <a:24-240> <unit> long. <Person> cuts it into <b:3-8> equal parts and uses <c:1-2> of them. How many <unit> are left?
A rectangular garden is <a:6-40> <unit> long and <b:3-25> <unit> wide. Fencing costs $<c:3-18> per unit of length. How much does it cost to fence the whole garden?
A floor measures <a:3-12> meters by <b:2-9> meters. Tiles are <c:20-50> centimeters on each side and cost $<d:1-6> each. What do the tiles for the floor cost?
The average of <n:3-6> test scores is <a:70-90>. <Person> takes one more test and scores <b:60-100>. What is the new average?
<Person> has $<a:40-200>. <Person> spends <frac> of it on <ware> and then $<b:5-20> on lunch. How much money is left?
<Person> and <person2> share <a:24-180> <thing> in the ratio <b:1-5>:<c:2-7>. How many does each of them get?
A phone plan costs $<a:15-45> a month plus <b:2-15> cents a minute after the first <c:50-300> minutes. <Person> talked for <d:320-900> minutes in <month>. How much is the bill?
<Person> saves $<a:5-40> in the first week and $<b:2-9> more each week than in the week before. How much has <person> saved after <c:4-12> weeks?
The population of a town is <a:2000-30000>. It grows by <pct> in the first year and shrinks by <pct2> in the second. What is the population after two years?
A <pet> eats <a:40-250> grams of food a day. A bag holds <b:2-12> kilograms and costs $<c:8-35>. How much does <person> spend on food for the <pet> in <d:60-180> days?
<Person> has <a:20-90> coins, all of them dimes and quarters. Their value is $<b:5-15>. How many quarters are there?
Two <vehicle>s start <a:100-500> miles apart and move toward each other, one at <b:20-50> miles per hour and the other at <c:30-60> miles per hour. After how many hours do they meet?
<Person> bought <a:3-12> packs of <thing> with <b:6-20> in each pack. <Person> gave <c:4-15> to <person2> and then lost <frac> of the rest. How many <thing> does <person> have now?
A factory makes <a:120-900> <product> a day. <B:2-9> of every 100 are defective. How many good ones does it make in <c:5-30> days?
<Person> borrows $<a:500-5000> at a simple interest rate of <b:3-9>% a year. How much is owed after <c:2-6> years?
A school orders <a:200-900> notebooks in <container>es of <b:20-48>. Each <container> costs $<c:12-60>, and shipping is $<d:5-25>. What is the total cost?
<Person> walks <a:2-6> blocks in <b:5-15> minutes. At the same pace, how long does it take to walk <c:8-30> blocks?
A movie is <a:85-170> minutes long. It begins at <h:1-9>:<m:10-50> p.m. and has an intermission of <b:10-20> minutes. When does it end?
A bus starts with <a:15-45> passengers. At the first stop <b:3-12> get off and <c:2-15> get on. At the second stop <frac> of the passengers get off. How many are on the bus now?
A <shop> bought <a:30-120> <ware> for $<b:3-12> each. It sold <frac> of them for $<c:14-30> each and the rest for $<d:6-13> each. What was its profit?
The temperature was <a:50-90> degrees in the morning. It rose by <b:3-15> degrees until noon and fell by <c:8-30> degrees by night. What was the temperature at night?
In a <event> game, a red card is worth <a:2-9> points and a blue card <b:10-25> points. <Person> has <c:3-12> red cards and <d:2-8> blue cards, and <person2> has twice as many red cards but no blue ones. Who has more points, and by how many?
<Person> has a <a:4-20>-page report to print for <b:6-40> people. Paper comes in packs of <c:50-200> sheets, and each sheet takes two pages. How many packs are needed?
A water bottle holds <a:400-900> milliliters. <Person> drinks <b:2-5> bottles on school days and <c:1-4> on the weekend days. How many liters does <person> drink in a week?
""",
    "formal_math": r"""
Solve for $<var>$: $<a:2-9><var> + <b:1-40> = <c:41-120>$.
Solve for $<var>$: $<a:2-9>(<var> - <b:1-9>) = <c:2-9><var> + <d:1-30>$.
Solve the equation $<var>^2 - <a:3-15><var> + <b:2-40> = 0$.
Find all real solutions of $<a:2-5>x^2 + <b:3-19>x - <c:1-20> = 0$.
Factor the expression $x^2 + <a:3-17>x + <b:2-60>$ if possible.
Expand and simplify $(<a:2-9>x + <b:1-9>)(<c:2-9>x - <d:1-9>)$.
Simplify the fraction $\frac{<a:12-240>}{<b:15-360>}$.
Compute $\frac{<a:1-9>}{<b:2-12>} + \frac{<c:1-9>}{<d:2-15>}$ and give the result as a reduced fraction.
Compute $\frac{<a:1-9>}{<b:2-12>} \div \frac{<c:1-9>}{<d:2-15>}$.
If $f(x) = <a:2-9>x^2 - <b:1-9>x + <c:1-20>$, what is $f(<d:2-9>)$?
If $f(x) = <a:2-9>x + <b:1-9>$ and $g(x) = x^2 - <c:1-9>$, find $f(g(<d:1-6>))$.
Let $f(x) = \frac{<a:2-9>x + <b:1-9>}{x - <c:1-9>}$. Find the value of $x$ for which $f(x) = <d:2-9>$.
Find the sum of the first $<n:10-60>$ terms of the arithmetic sequence $<a:1-12>, <b:13-20>, \ldots$.
The first term of a geometric sequence is $<a:2-9>$ and the common ratio is $<r:2-4>$. What is the <n:4-8>th term?
What is the remainder when $<a:100-9999>$ is divided by $<b:7-23>$?
Find the greatest common divisor of $<a:24-600>$ and $<b:30-720>$.
Find the least common multiple of $<a:6-60>$, $<b:8-48>$ and $<c:4-20>$.
How many positive divisors does $<a:60-900>$ have?
Write the prime factorization of $<a:84-2400>$.
Is $<a:101-997>$ a prime number? Explain how you know.
What is the units digit of $<a:2-9>^{<n:11-60>}$?
What is $<a:12-99> \times <b:12-99>$?
What is $<a:1000-9999> - <b:100-999> + <c:10-99>$?
Evaluate $<a:2-9> + <b:2-9> \times (<c:10-30> - <d:2-9>)^2$.
Evaluate $\sqrt{<s:4-30>^2 + <t:3-25>^2}$ and simplify the radical if needed.
What is <pct> of $<a:40-900>$?
A number is increased by <pct> and the result is $<a:60-600>$. What was the number?
A triangle has sides of length $<a:5-12>$, $<b:6-13>$ and $<c:8-15>$. What is its perimeter, and is it a right triangle?
The legs of a right triangle are $<a:3-20>$ and $<b:4-24>$. Find the length of the hypotenuse.
A circle has radius $<r:2-25>$. Find its area and its circumference in terms of $\pi$.
The area of a circle is $<s:4-144>\pi$. What is its diameter?
A rectangle has a perimeter of $<a:20-90>$ and its length is $<b:1-9>$ more than its width. Find its area.
A cylinder has radius $<r:2-12>$ and height $<h:3-20>$. What is its volume in terms of $\pi$?
A cube has a surface area of $<a:24-600>$. Find its volume.
The angles of a triangle are in the ratio $<a:1-4>:<b:2-5>:<c:3-6>$. Find the largest angle.
Find the distance between the points $(<a:1-9>, <b:1-9>)$ and $(<c:10-20>, <d:1-15>)$.
Find the slope and the $y$-intercept of the line $<a:2-9>x + <b:2-9>y = <c:6-60>$.
Find the equation of the line through $(<a:1-6>, <b:1-9>)$ and $(<c:7-12>, <d:1-15>)$.
At what point do the lines $y = <a:2-6>x + <b:1-9>$ and $y = <c:7-11>x - <d:1-9>$ meet?
Solve the system $<a:1-5>x + y = <b:8-40>$ and $x - y = <c:1-12>$.
Find $x + y$ if $<a:2-7>x + <b:2-7>y = <c:20-60>$ and $x = y + <d:1-5>$.
If $2^{x} = <p:8-512>$, estimate $x$ and say whether it is an integer.
Simplify $x^{<a:2-9>} \cdot x^{<b:2-9>} \div x^{<c:1-4>}$.
Compute $\log_{<b:2-5>}(<b>^{<n:2-7>})$.
Convert $<a:20-340>$ degrees to radians.
What is the value of $\sin^2(<a:10-80>^\circ) + \cos^2(<a>^\circ)$? Explain.
Find the derivative of $f(x) = <a:2-9>x^{<n:2-5>} - <b:2-9>x + <c:1-9>$.
Compute $\int_0^{<a:1-6>} (<b:2-9>x + <c:1-9>)\,dx$.
How many ways are there to arrange the letters of the word "<arrange>"?
How many ways are there to choose $<k:2-4>$ students from a group of $<n:6-15>$?
Two fair dice are rolled. What is the probability that the sum is $<s:3-11>$?
A bag has $<a:2-9>$ red, $<b:2-9>$ blue and $<c:2-9>$ green marbles. Two are drawn without replacement. What is the probability that both are <color>?
A fair coin is flipped $<n:3-8>$ times. What is the probability of exactly $<k:1-3>$ heads?
What is the mean and the median of $<a:1-30>, <b:1-30>, <c:1-30>, <d:1-30>, <e:1-30>$?
The mean of five numbers is $<a:10-40>$. Four of them are $<b:5-20>$, $<c:5-30>$, $<d:10-40>$ and $<e:10-40>$. Find the fifth.
Convert the number $<a:20-500>$ from base ten to base <base>.
What is the sum of the digits of $<a:1000-99999>$?
Find the smallest positive integer $n$ such that $<a:3-15>n > <b:100-900>$.
Find the value of $|<a:2-20> - <b:21-60>| + |<c:1-9> - <d:10-30>|$.
Solve the inequality $<a:2-9>x - <b:1-20> < <c:21-80>$.
If $a \star b = <m:2-6>a + b^2$, what is $<a:2-9> \star <b:2-9>$?
The sum of <three> consecutive integers is $<a:30-300>$. What are they, if they exist?
Round $<a:100-999>.<b:1001-9999>$ to the nearest tenth.
A sequence begins with $<a:1-9>$, and each term is <r:2-4> times the one before plus $<b:1-6>$. Find the fifth term.
""",
    "chat": """
*2 Explain <topic> to <audience>.
*2 Explain <topic> in <length>.
*2 What is <topic>, and why does it matter?
What are the most common misconceptions about <topic>?
Give me a short history of <topic>.
*2 Explain the difference between <pair>.
Compare <pair> in a table with three rows.
Which is better for <audience>: <pair>? Give reasons for both sides.
Summarize what you know about <topic> in <length>.
Write a <tone> introduction to <topic> for <audience>.
Write three quiz questions about <topic>, each with four choices and the right answer marked.
What are five interesting facts about <topic>?
Describe an analogy that helps <audience> understand <topic>.
I have to give a talk about <topic> to <audience>. Draft an outline with an opening, three points and a closing.
Make a list of the key terms about <topic> with a one-line definition of each.
*2 <question>?
*2 <question>? Answer in <length>.
<question>? Explain it to <audience>.
<question>? Use a <tone> tone.
*2 List <n:5-12> <listof>.
List <n:3-10> <listof> and explain each in one sentence.
Give me <n:4-12> <listof> as a numbered list.
Brainstorm <n:5-15> <listof>. Be <tone>.
*2 Write a <genre> story about <storyseed>.
*2 Write a <form> about <storyseed>.
Write the first paragraph of a <genre> story that begins with <storyseed>.
Write a <tone> <form> about <storyseed> in <length>.
Continue this story: "It was a quiet <day> evening when <person> found <storyseed>."
Invent three titles for a <genre> novel about <storyseed>, and give each a one-sentence summary.
Write a dialogue between <role> and <role2> about <topic>.
*2 You are <role>. <question>?
Pretend to be <role> and explain <topic>.
Act as <role>. I will tell you my problem: <problem>. What do you say?
You are <role> who knows a lot about <topic>. Greet me and tell me something surprising.
*2 <Problem>. What can I do?
<Problem>. Give me <n:3-8> practical tips.
<Problem>. Give me advice in a <tone> tone.
Make a plan for someone who says: "<Problem>."
*2 Write a <tone> email <mailreason>.
Write an email <mailreason>. Sign it as <person>.
Write a short text message <mailreason>. Keep it <tone>.
Write a letter <mailreason>, in <length>.
Help me plan <project>.
Make a checklist for <project>.
Write a step-by-step guide for <project>, in a <tone> tone.
What should I think about before I start <project>?
*2 Do you agree? "<statement>." Give arguments for and against.
Write a <tone> paragraph that argues: <statement>.
Write a counterargument to this claim: "<statement>."
Translate into <language>: "<phrase>"
How do you say "<phrase>" in <language>? Explain each word.
Correct the grammar of this sentence and explain the changes: "<badgrammar>"
*2 Rewrite this sentence in a more <tone> way: "<phrase>"
*2 Rewrite the following text in <length>: "<passage>"
*2 Summarize this text in one sentence: "<passage>"
Turn this text into bullet points: "<passage>"
Write a title for this text and list its main ideas: "<passage>"
What questions does this text answer? "<passage>"
Rewrite this text for <audience>: "<passage>"
Extract the name, the city, the job and the age from this text as JSON: "<bio>"
Read the text and answer with a JSON object with the keys "name", "age" and "likes": "<bio>"
Extract every number in this text as a JSON list: "<bio>"
Put this information into a markdown table: "<bio> <bio2>"
What does a <trade> do on a normal day?
What skills does a <trade> need, and how can I learn them?
Write a job advertisement for a <trade> in <city>, in a <tone> tone.
Interview me for a job as a <trade>. Start with your first three questions.
What should I see in <city> in <n:2-5> days?
I am going to <city> in <month>. What should I pack?
Write a <tone> travel tip about <city> in <length>.
Tell me about the food, the weather and the transport in <city>.
Write a <tone> product description for a <single>.
Suggest <n:3-8> names for a shop that sells <ware>, and explain your favorite.
Plan a <event> for <n:6-40> guests with a budget of $<b:100-900>.
Write a toast for a <event> in a <tone> tone.
Write a recipe for <food> for <n:2-8> people.
How can I get better at <activity> in <n:2-8> weeks?
Write a weekly schedule for someone who loves <activity> and works on <day>.
Give me a <tone> motivational message about <activity>.
Hi! I am <person> and I like <activity>. What could I try next?
Can you recommend a gift for <person>, who likes <activity> and <activity2>?
Write a <form> for <person>, who has just started <activity>.
How do I take care of a <pet>?
Classify each item as a fruit, an animal or a tool, and answer as a list: <sortitems>.
Sort these words alphabetically and then by length: <sortitems>.
Which of these does not belong, and why? <sortitems>
Write one sentence that uses all of these words: <sortitems>.
Think of a riddle whose answer is "<single>".
What are the advantages and disadvantages of <topic>?
How has <topic> changed everyday life?
Teach me about <topic> by asking me one question at a time.
Imagine a world without <topic>. Describe a normal day in <length>.
What is the capital of <country>, and what is it known for?
Tell me three facts about <country>. Then tell me three about <country2>.
Compare the climate of <country> and <country2>.
Who was <figure>, and why is this person remembered?
What would <figure> say about <topic> today? Write it as a <form>.
Write a short biography of <figure> for <audience>.
Write an interview in which <figure> answers <n:3-5> questions from <role>.
<Person> is taller than <person2>. <Person2> is taller than <person3>. Who is the shortest? Explain your reasoning.
All <thing> in the <container> are <adj>. This one is not <adj>. Is it from the <container>? Explain.
<Person>, <person2> and <person3> sit in a row. <Person> is not at the left end, and <person2> sits directly right of <person3>. Who sits where?
Three boxes are labeled <thing>, <thing2> and mixed, and every label is wrong. How can you find out what is in each box by opening one of them?
If it is <day> today, which day will it be in <n:5-60> days? Explain how you found out.
<Person> has two sisters, and each sister has one brother. How many children are in the family? Explain.
Imagine you could only keep <n:2-4> of these: <topic>, <topic2>, <topic3>. Which ones and why?
Write a short review of a <place> in <city> for a travel site. Give <n:1-5> stars out of 5.
Rate this sentence from 1 to 10 for clarity and suggest a better one: "<badgrammar>"
Is this review positive, negative or mixed? Explain. "<review>"
Extract the product, the price and the opinion from this review as JSON: "<review>"
Reply politely to this customer: "<review>"
Define the word "<adj>" and use it in <n:2-4> sentences.
Give <n:3-6> synonyms and two antonyms of "<adj>".
Describe a <adj> <single> using all five senses.
Write <n:3-8> rhyming lines about a <adj> <pet> in <city>.
What happens if you mix <drink> and <drink2>?
Write a conversation in a <shop> between a <trade> and a customer who wants <ware>.
Give a <tone> answer to a child who asks: "<question>?"
""",
    "chat_ask": """
*14
Keep the answer short.
Use simple words.
*2 Answer in <length>.
Use headings and bullet points.
Write in a <tone> tone.
Give an example.
Do not use the word "very".
End with a question for me.
Start with the most important point.
Use at least one comparison.
Finish with a one-line summary.
Write your whole answer in lowercase.
Use markdown with bold key terms.
Avoid technical words.
Write at least <words:40-250:10> words.
Use exactly <paragraphs:2-6> paragraphs.
Include the words "<single>" and "<city>".
Mention <topic2> once.
Put the title in double angular brackets.
Separate the parts with a line of three stars.
Do not use any commas.
Answer in the form of a letter.
Give your answer as a JSON object with the keys "summary" and "details".
Start every sentence with a different letter.
Say what you are not sure about.
Explain your reasoning first.
Add a postscript that begins with P.S.
Highlight <phrases:2-4> phrases with *asterisks*.
Finish with the sentence "I hope this helps, <person>."
""",
    "passage": """
The <shop> on the corner opened in <y:1950-2015> and is run by <person>. It sells <ware> and <ware2>, and on <day>s it stays open until <h:7-10> in the evening. Many people come from <city> to visit it.
<Person> started <activity> at the age of <n:7-30>. At first it was difficult, but after <b:2-9> months of practice <person> joined a club in <city> and now teaches beginners every <day>.
Researchers in <city> asked <n:200-900> people how they spend their evenings. <Pct> said <activity>, <pct2> said <activity2>, and the rest could not decide. The study will be repeated in <month>.
The town council of <city> has decided to build a new <place>. It will cost <n:2-40> million dollars and open in <month>. Some residents are happy, while others would rather have a <place2>.
Last <month>, <person> and <person2> organized a <event>. <N:30-300> guests came, and the <food> were gone after an hour. They plan to do it again next year with more <drink>.
The <vehicle> to <city> was <n:20-90> minutes late because of heavy snow. <Person> used the time for <activity> and met <person2>, an old friend from school. They talked about <topic> until they arrived.
Many people think that <topic> is hard to understand. <Person>, a <trade> from <city>, disagrees. Every <day> <person> gives a free lesson at the <place> and uses <thing> to explain the idea.
""",
    "bio": """
<Person> is a <n:19-70>-year-old <trade> from <city> who loves <activity>.
My name is <person>. I am <n:19-70>, I live in <city>, and I work as a <trade>.
<Person>, aged <n:19-70>, moved to <city> in <y:1990-2020> to become a <trade> and now enjoys <activity> on <day>s.
In <city> lives a <trade> called <person>, who turned <n:19-70> in <month> and spends every <day> <activity>.
""",
    "review": """
I bought this <single> for $<a:5-120> in <month>. It is <adj>, but the handle broke after <n:2-9> weeks.
The <food> at the new <shop> in <city> were <adj> and cost only $<a:4-30>. We waited <n:5-60> minutes, though.
Best <single> I ever had! <N:2-9> months of daily use and it still looks <adj>. Worth every cent of the $<a:10-150>.
We visited the <place> on <day>. The staff was <adj>, the line was long, and the tickets were $<a:5-60>. Not again.
For $<a:8-90> I expected more from this <single>. The color is <adj> and the box was open when it arrived.
""",
    "badgrammar": """
<Person> have three <thing> and he want to buys more.
Yesterday we was going to the <place> but it were closed.
Me and <person> likes <activity> on the <day>.
The <shop> sell <ware> since ten years.
She don't know nothing about <topic>.
If I would have time, I would of visited <city> in <month>.
There is many <thing> in the <container> who belongs to <person>.
""",
    "sortitems": """
apple, hammer, <pet>, pear, saw
<pet>, banana, screwdriver, horse, plum
wrench, cherry, <pet>, drill, mango, cow
river, <single>, mountain, <pet>, lake
violin, <drink>, trumpet, <single>, piano
<city>, <city2>, <person>, <pet>
<activity>, <trade>, <single>, <city>
""",
    "code_ask": """
*4 Complete this Python function.
*4 Write the body of the following function.
*3 Implement the function below.
*3 Solve this programming problem in Python and make sure your code gives the results in the examples.
*3 Write a solution to this problem so that all of its examples pass:
*2 Finish the function so that the doctests pass.
*2 Please complete the code and explain it briefly.
*2 Here is a function without a body. Fill it in.
Write clean Python code for this task. Return only the code.
Complete the code. Use only the standard library.
Complete the following Python code without changing its signature.
Write the function, then show one more example of its use.
Implement this with a simple loop:
Implement this in one line if you can:
My tests call the function below. Write it so that they pass.
Read the docstring and write the missing code.
Provide a solution in a python code block:
*2 Can you write this function for me?
""",
    "snippet_ask": """
*3 Explain what this Python code does.
*2 Explain this code line by line.
*2 Write a docstring for this function.
*3 Write three unit tests for this function with pytest.
Rewrite this function with a plain for loop.
Make this code easier to read.
What does this function return for an empty list?
Add type hints and a docstring to this function.
Suggest a better name for this function and explain why.
Rewrite this function in JavaScript.
What is the time complexity of this function? Explain.
Review this code as a senior developer would.
*2 Add error handling to this function.
""",
    "code_chat": """
*2 Write a Python class for a <noun> with methods to <verb>, <verb2> and print it.
Write a Python program that asks the user for <n:2-5> <thing> and prints them sorted by length.
*2 Write a Python function that takes <argument> and returns <returned>.
*2 Write a Python function that takes <argument> and returns <returned>. Include <codeextra>.
Write a Python script that reads a CSV file of <thing> with the columns "name", "price" and "quantity" and prints the total value.
How do I <howto> in Python?
*2 Show me how to <howto> in Python, with a short example.
What is the difference between <pypair> in Python? Give an example.
Explain <concept> in Python with an example.
Write a SQL query that finds <sqlgoal> in a table "<table>" with the columns id, name, city, price and created_at.
Write a regular expression that matches <regexgoal>, and explain each part.
Write a shell command that <shellgoal>.
Write an HTML page with a heading, a list of <n:3-7> <thing> and a button.
Write a JavaScript function that takes <argument> and returns <returned>.
Write a small Python game in which the player <gamegoal>.
Write pytest tests for a function `<fname>` that takes <argument> and returns <returned>.
My Python program prints "<pyerror>". What does this mean, and how can I fix it?
Implement <algorithm> in Python and explain how it works.
*2 Implement <algorithm> in Python. Include <codeextra>.
Give the time and space complexity of <algorithm> and show a short Python version.
Write a command line tool in Python with argparse that <toolgoal>.
Design the Python functions of a program that <toolgoal>. Give each a signature and a docstring.
Write a Python dataclass for a <noun> with <n:3-5> fields and a method to <verb> it.
Write pseudocode for a program that <toolgoal>.
Here is the head of a CSV file: "name,price,city\\n<single>,<a:2-90>,<city>\\n<single2>,<b:2-90>,<city2>". Write Python code that reads it and prints <csvgoal>.
Write a Python function `<fname>(<args>)` that uses <concept>. Choose a sensible purpose and document it.
I have the list [<a:1-60>, <b:1-60>, <c:1-60>, <d:1-60>]. How do I <howto> or sort it in Python?
Convert this loop into a list comprehension: `for x in range(<a:2-60>): result.append(x * <b:2-12>)`.
Write a loop in Python that prints the numbers from <a:1-20> to <b:30-200> in steps of <c:2-9>.
Write a Python function that converts <a:2-90> <thing> in <n:2-9> <container>es into a sentence.
Write Python code that stores these items with their prices in a dictionary and prints the cheapest: <single> $<a:2-60>, <single2> $<b:2-60>, <single3> $<c:2-60>.
""",
    "code_chat_ask": """
*12
Add comments.
Include a short example of its use.
*2 Keep it simple.
Explain your solution afterwards.
Use type hints.
Handle errors.
Use only the standard library.
I am a beginner.
Show the output too.
Mention one common mistake.
Return only the code.
Explain each line.
""",
}

WORDS |= {
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

FUNCTIONS = """
count_vowels(text)|Count the vowels in text.|sum(c in 'aeiou' for c in text)
count_long_words(text, k)|How many words of text have more than k letters?|sum(len(w) > k for w in text.split())
letter_counts(word)|Map each letter of word, in alphabetical order, to how often it occurs.|{c: word.count(c) for c in sorted(word)}
first_repeated_letter(word)|Return the first letter of word that has occurred before, or None.|next((c for i, c in enumerate(word) if c in word[:i]), None)
acronym(text)|Build an acronym in capitals from the first letters of the words in text.|''.join(w[0].upper() for w in text.split())
shift_letters(word, k)|Shift each lowercase letter k places forward in the alphabet; after z comes a.|''.join(chr((ord(c) - 97 + k) % 26 + 97) for c in word)
has_unique_letters(word)|Check that no letter occurs twice in word.|len(set(word)) == len(word)
run_lengths(word)|Return pairs of a letter and the length of its run, in order.|[(c, len([*g])) for c, g in groupby(word)]
vowel_positions(word)|Return the positions, from 0, at which word has a vowel.|[i for i, c in enumerate(word) if c in 'aeiou']
shared_letters(word, other)|Return the letters that both words contain, as a sorted string.|''.join(sorted(set(word) & set(other)))
split_word(word, k)|Split word after k letters and return both parts.|(word[:k], word[k:])
rotate_word(word, k)|Move the first k letters of word to its end.|word[k:] + word[:k]
alternate_case(word)|Write the letters at even positions in upper case, the others in lower case.|''.join(c.upper() if i % 2 == 0 else c for i, c in enumerate(word))
word_value(word)|Add up the positions of the letters in the alphabet (a is 1).|sum(ord(c) - 96 for c in word)
by_last_letter(text)|Sort the words of text by their last letter; equal ones keep their order.|sorted(text.split(), key=lambda w: w[-1])
weave_words(word, other)|Take letters from word and other in turn until the shorter one ends.|''.join(a + b for a, b in zip(word, other))
repeat_letters(word, k)|Repeat every letter of word k times.|''.join(c * k for c in word)
longest_word_length(text)|Return the length of the longest word in text.|max(len(w) for w in text.split())
flip_words(text)|Reverse each word of text but keep the order of the words.|' '.join(w[::-1] for w in text.split())
words_by_length(text)|Group the words of text by their length in a dictionary.|{n: [w for w in text.split() if len(w) == n] for n in sorted({len(w) for w in text.split()})}
strip_ends(word)|Return word without its first and last letter.|word[1:-1]
to_snake(text)|Join the words of text with underscores and end with a capital X.|'_'.join(text.split()) + 'X'
chunks(items, k)|Cut items into lists of length k; the last one may be shorter.|[items[i:i + k] for i in range(0, len(items), k)]
window_sums(items)|Return the sums of all neighbouring pairs in items.|[a + b for a, b in zip(items, items[1:])]
rotate_left(items, k)|Rotate items k places to the left (k may exceed the length).|items[k % len(items):] + items[:k % len(items)]
steps(items)|Return the change from each item to the next.|[b - a for a, b in zip(items, items[1:])]
peaks(items)|Return the items that are larger than both of their neighbours.|[b for a, b, c in zip(items, items[1:], items[2:]) if a < b > c]
second_largest(items)|Return the second largest different value, or None.|([None] + sorted(set(items)))[-2]
position_of_largest(items)|Return the index of the first largest item.|items.index(max(items))
is_rising(items)|Is every item larger than the one before it?|all(a < b for a, b in zip(items, items[1:]))
partition(items, n)|Return two lists: the items below n and the others, both in order.|([x for x in items if x < n], [x for x in items if x >= n])
frequencies(items)|Map each different item, smallest first, to the number of times it occurs.|{x: items.count(x) for x in sorted(items)}
running_maximum(items)|For every position, return the largest item so far.|[max(items[:i + 1]) for i in range(len(items))]
merge(items, others)|Merge both lists into one sorted list.|sorted(items + others)
only_in_first(items, others)|Return the items that others does not contain, in order.|[x for x in items if x not in others]
dot_product(items, others)|Multiply the lists item by item, up to the shorter length, and add up the products.|sum(a * b for a, b in zip(items, others))
drop_every_kth(items, k)|Remove the k-th, 2k-th, 3k-th ... item.|[x for i, x in enumerate(items, 1) if i % k]
trimmed_sum(items)|Add up the items without one smallest and one largest item.|sum(sorted(items)[1:-1])
closest(items, n)|Return the item that is closest to n; the first one in a tie.|min(items, key=lambda x: abs(x - n))
pairs_above(items, n)|Count the pairs of different positions whose items sum to more than n.|sum(a + b > n for i, a in enumerate(items) for b in items[i + 1:])
to_front(items, n)|Put the items divisible by n first; keep the order within both groups.|[x for x in items if x % n == 0] + [x for x in items if x % n]
weighted_sum(items)|Multiply each item by its position, from 1, and add up the results.|sum(i * x for i, x in enumerate(items, 1))
ranks(items)|Replace each item by its rank among the different values (smallest is 1).|[sorted(set(items)).index(x) + 1 for x in items]
longest_gap(items)|Return the largest difference between neighbours of the sorted items.|max(b - a for a, b in zip(sorted(items), sorted(items)[1:]))
balance_point(items)|Return the first index where the sum on the left is at least the sum on the right, or -1.|next((i for i in range(len(items)) if sum(items[:i]) >= sum(items[i + 1:])), -1)
reverse_digits(n)|Reverse the decimal digits of the non-negative integer n.|int(str(n)[::-1])
divisors(n)|List all positive divisors of n.|[d for d in range(1, n + 1) if n % d == 0]
is_prime_number(n)|Tell whether n is prime.|n > 1 and all(n % d for d in range(2, n))
primes_below(n)|List the primes smaller than n.|[p for p in range(2, n) if all(p % d for d in range(2, p))]
binary_digits(n)|Return the binary digits of n as a list, most significant first.|[int(d) for d in bin(n)[2:]]
sum_multiples(n, k)|Add up the multiples of k that are at most n.|sum(range(k, n + 1, k))
digital_root(n)|Add up the digits of n until one digit is left.|1 + (n - 1) % 9
clock(n)|Turn n minutes after midnight into a string such as '07:05'.|f'{n // 60 % 24:02d}:{n % 60:02d}'
countdown(n, k)|Count down from n in steps of k as long as the number is positive.|[*range(n, 0, -k)]
fizz(n)|List the numbers from 1 to n, with 'fizz' in place of multiples of 3.|['fizz' if i % 3 == 0 else i for i in range(1, n + 1)]
is_leap(n)|Would the year 1900 + n be a leap year?|(1900 + n) % 4 == 0 and ((1900 + n) % 100 != 0 or (1900 + n) % 400 == 0)
digit_product(n)|Multiply the decimal digits of n.|prod(int(d) for d in str(n))
in_base(n, k)|Write n in base k (2 to 9) as a string.|''.join(str(n // k**i % k) for i in reversed(range(12))).lstrip('0') or '0'
split_bill(n, k)|Divide n coins among k friends: return the share of each and the rest.|divmod(n, k)
multiples_table(n, k)|Return a dictionary that maps 1 to k to the multiples of n.|{i: i * n for i in range(1, k + 1)}
cheapest(prices)|Return the name with the lowest price.|min(prices, key=lambda name: prices[name])
total_price(prices)|Add up all prices.|sum(prices.values())
affordable(prices, n)|Return the names, in alphabetical order, whose price is at most n.|sorted(name for name in prices if prices[name] <= n)
by_price(prices)|Return the names from the most to the least expensive.|sorted(prices, key=lambda name: -prices[name])
raise_prices(prices, k)|Return a new dictionary in which every price is k higher.|{name: price + k for name, price in prices.items()}
swap_keys(prices)|Return a dictionary from prices to names.|{price: name for name, price in prices.items()}
price_range(prices)|Return the lowest and the highest price as a tuple.|(min(prices.values()), max(prices.values()))
transpose(matrix)|Exchange rows and columns.|[[*column] for column in zip(*matrix)]
row_sums(matrix)|Return the sum of every row.|[sum(row) for row in matrix]
column_maxima(matrix)|Return the largest value of every column.|[max(column) for column in zip(*matrix)]
flatten(matrix)|Put all rows one after the other into one list.|[x for row in matrix for x in row]
mirror(matrix)|Reverse each row.|[row[::-1] for row in matrix]
scale(matrix, k)|Multiply every entry by k.|[[k * x for x in row] for row in matrix]
largest_row(matrix)|Return the index of the row with the largest sum; the first one in a tie.|max(range(len(matrix)), key=lambda i: sum(matrix[i]))
clockwise(matrix)|Rotate the matrix by 90 degrees clockwise.|[[*row] for row in zip(*matrix[::-1])]
count_above(matrix, n)|Count the entries that are greater than n.|sum(x > n for row in matrix for x in row)
"""
